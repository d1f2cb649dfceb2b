"""What `TFTrainer` does in the driver: its arguments, and trials of Ray Tune."""
