"""WHEN: the core of one step. Units, lanes, the schedule, hooks, forward, backward, the engine."""
