"""Validation beside the training: by workers that do nothing else."""
