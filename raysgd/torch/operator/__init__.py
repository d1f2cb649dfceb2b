"""The library's record of a PyTorch operator, and the implementation of `register`."""
