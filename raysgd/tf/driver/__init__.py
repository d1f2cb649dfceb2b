"""The driver's part of `TFTrainer`: argument checks."""
