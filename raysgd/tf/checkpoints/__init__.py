"""Checkpoint files of TensorFlow: written completely, read strictly."""
