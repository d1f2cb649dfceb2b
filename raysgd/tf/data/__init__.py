"""Datasets of TensorFlow: their division over the workers, and the position in them."""
