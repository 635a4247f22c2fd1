"""The examples, run in a small setting as their users would, and the fetching of their data."""
