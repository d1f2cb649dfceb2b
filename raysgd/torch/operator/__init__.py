"""What the library keeps about an operator, and what `register` does."""
