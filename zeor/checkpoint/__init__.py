"""What survives a run: saved, loaded, exported, in files without a pickle. docs/checkpoints.md is the format."""
