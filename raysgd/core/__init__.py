"""The base of every trainer: the engine, the connections between workers, and helpers that need no framework."""
