"""The library's record of a PyTorch operator, and the work of `register`."""
