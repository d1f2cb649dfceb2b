"""Messages between the driver and the workers of class-based trainers."""
