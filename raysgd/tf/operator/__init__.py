"""Internal records of an operator."""
