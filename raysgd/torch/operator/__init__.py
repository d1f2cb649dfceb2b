"""Private state that the library keeps for a PyTorch operator, and the implementation of `register`."""
