"""Checkpoint files of PyTorch: written whole, read strictly."""
