"""What the driver and the workers of class-based trainers send each other."""
