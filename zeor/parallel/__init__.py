"""ZeRO beside other ways of dividing a model: what they leave is sharded."""
