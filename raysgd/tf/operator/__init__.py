"""The library's records about an operator."""
