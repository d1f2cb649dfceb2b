"""The driver side of class-based trainers: calls, the loop over epochs, predictions, checkpoints."""
