"""Data types and interfaces that the engine's code in the driver shares with its code in the workers."""
