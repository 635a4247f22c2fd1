"""One-pass updates: each kernel is one file, and one line in registry.py."""
