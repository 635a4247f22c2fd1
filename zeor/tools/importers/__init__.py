"""`zeor import`: checkpoints of others, which are pickles, into zeor's own format."""
