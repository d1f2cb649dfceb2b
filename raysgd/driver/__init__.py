"""The driver of class-based trainers: calls, the loop of epochs, predictions, saves."""
