"""The base of every trainer: the engine, the connections between workers, and framework-independent helpers."""
