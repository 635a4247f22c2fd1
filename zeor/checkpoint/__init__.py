"""What survives a run: tensors in files, read and (soon) written by slice. No pickle is ever loaded."""
