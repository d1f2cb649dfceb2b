"""Reads and writes PyTorch checkpoints. Writes are atomic, and reads reject damaged or unsafe files."""
