"""Framework-independent code for datasets and batches: arrays, data frames, Ray Data datasets and predictions."""
