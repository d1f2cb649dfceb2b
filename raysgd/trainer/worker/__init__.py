"""The worker side of `TorchTrainer` and `TFTrainer`: holds the training operator and runs the driver's calls."""
