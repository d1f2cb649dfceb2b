"""What the class-based trainers of both frameworks share: the driver's half, the worker's half, and what they exchange."""
