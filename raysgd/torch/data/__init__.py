"""Shards PyTorch loaders and datasets over the workers, and resumes them in the middle of an epoch."""
