"""The driver's part of `TorchTrainer`: checks of arguments and of workers' results, and files."""
