"""The command line and what it shows: a small GPT, a text to train it on, tables and a progress bar.

Nothing in the engine imports from here.
"""
