"""The driver's part of `TorchTrainer`: checks arguments and workers' results, and saves and loads files."""
