"""Records about an operator."""
