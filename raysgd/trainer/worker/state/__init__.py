"""Reads, checks, copies and restores the training state of one worker."""
