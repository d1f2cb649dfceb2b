"""Data types and interfaces that all parts of the engine share. Code in workers may import any of these modules."""
