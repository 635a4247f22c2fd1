"""Owners: whole parameters, each computed by one rank, for optimizers that look at matrices."""
