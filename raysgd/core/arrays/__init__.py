"""Framework-independent operations on arrays and batches: nesting, splitting and concatenating."""
