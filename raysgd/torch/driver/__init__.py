"""The parts of `TorchTrainer` in the driver: they check arguments and the workers' results, and save and load files."""
