"""What the library keeps about an operator."""
