"""Checkpoint files of TensorFlow: written whole, read strictly."""
