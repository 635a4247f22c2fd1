"""Benchmarks of zeor beside its peers: `python -m benchmarks.NAME` from the repository's root."""
