"""The driver's part of `TorchTrainer`: checks of arguments and answers, and files."""
