"""An optimizer step: gradients, schedulers, and undoing an interrupted batch."""
