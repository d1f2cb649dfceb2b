"""What `TorchTrainer` does in the driver: arguments, saves, loads, changes."""
