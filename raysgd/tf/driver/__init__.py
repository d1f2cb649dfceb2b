"""The code of `TFTrainer` that runs only in the driver: checks of the trainer's arguments."""
