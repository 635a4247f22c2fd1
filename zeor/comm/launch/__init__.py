"""Local ranks from a script, and the process group of whatever started this process."""
