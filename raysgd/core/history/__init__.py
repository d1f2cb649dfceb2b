"""The history of a trainer: its metrics by epoch, how each rank spent its time, their display, and Ray metrics."""
