"""Keeps the copies of a model equal: gradients, metrics and variables of all workers."""
