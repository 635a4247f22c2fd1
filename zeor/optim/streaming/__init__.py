"""Updates of lanes of which something rests elsewhere or in a small format, chunk by chunk."""
