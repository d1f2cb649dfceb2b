"""The driver's part of `TorchTrainer`: arguments, files, changes."""
