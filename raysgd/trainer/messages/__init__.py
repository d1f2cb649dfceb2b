"""Messages between the driver and the workers of a `TorchTrainer` or `TFTrainer`."""
