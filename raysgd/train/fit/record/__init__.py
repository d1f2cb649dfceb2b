"""What a run of `fit` writes down: reports, checkpoints that stay, progress in the console."""
