"""Computes gradients, steps optimizers and learning rate schedulers, and undoes batches that a failure interrupts."""
