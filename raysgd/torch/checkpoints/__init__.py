"""Reads and writes PyTorch checkpoints. Files are written atomically, and damaged or unsafe files are rejected."""
