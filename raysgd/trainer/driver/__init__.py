"""The driver side of `TorchTrainer` and `TFTrainer`: calls to workers, loops over epochs, predictions, checkpoints."""
