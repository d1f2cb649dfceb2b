"""The part of `TorchTrainer` that runs in the driver: checks arguments and workers' results, saves and loads files."""
