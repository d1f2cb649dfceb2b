"""Helpers for objects of Keras and `tf.data`: models, optimizers, learning rates, names and datasets."""
