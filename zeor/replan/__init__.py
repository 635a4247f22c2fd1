"""WHAT CHANGES: the plan of a running job, in memory."""
