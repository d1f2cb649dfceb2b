"""Datasets of TensorFlow: divided over the workers, and the position in them."""
