"""The driver's part of `TFTrainer`: checks of its arguments."""
