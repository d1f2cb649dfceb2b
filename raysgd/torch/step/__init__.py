"""Computes gradients, steps optimizers and learning rate schedulers, and explains PyTorch's unclear errors."""
