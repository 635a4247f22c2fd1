"""WHEN: units, the schedule, the hooks that drive it and the engine that carries it out."""
