"""A trainer's history: metrics by epoch, the time that each rank spent, their display as text, and Ray metrics."""
