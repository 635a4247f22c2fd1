"""WHICH MODULES: units of a model, wrappers, and what cannot be sharded."""
