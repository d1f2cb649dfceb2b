"""Data types and interfaces that all parts of the engine share. Workers may import any of these modules."""
