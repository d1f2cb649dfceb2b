"""An optimizer step: gradients, schedulers, and undo of an interrupted batch."""
