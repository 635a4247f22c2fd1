"""HOW IT MOVES: who is there, the exact verbs, and how ranks agree.

Moves flat tensors between ranks and counts the bytes. Knows no unit, no optimizer and no hook.
"""
