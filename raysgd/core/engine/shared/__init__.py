"""Data types and interfaces shared by the engine's code in the driver and in the workers, which may import them all."""
