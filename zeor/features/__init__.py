"""WHAT HANGS ON A STEP: each file one feature, an Extension of step/extension.py or a verb over it."""
