"""What belongs to an optimizer step: gradients, learning rate schedulers, and undoing an interrupted batch."""
