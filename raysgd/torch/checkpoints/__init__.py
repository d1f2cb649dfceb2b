"""Checkpoint files of PyTorch, which are written atomically and read strictly."""
