"""The code that the class-based trainers of both frameworks share, in the driver and in the workers."""
