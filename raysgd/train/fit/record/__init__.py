"""The record of a run of `fit`: reports, checkpoints that stay, progress in the console."""
