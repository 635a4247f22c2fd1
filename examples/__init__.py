"""Real programs with zeor; each runs as `python examples/NAME.py`, under torchrun, and as `python -m examples.NAME`."""
