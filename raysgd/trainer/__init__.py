"""The code that `TorchTrainer` and `TFTrainer` share, in the driver and in the workers."""
