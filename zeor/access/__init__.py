"""WHAT A USER DOES TO A SHARDED MODEL: reads, writes, full parameters, filling."""
