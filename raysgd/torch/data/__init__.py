"""Loaders and datasets of PyTorch: divided over the workers, and the position in them."""
