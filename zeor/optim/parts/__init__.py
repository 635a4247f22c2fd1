"""What an optimizer steps on, what kind it is, and what it keeps of each parameter."""
