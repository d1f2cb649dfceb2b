"""A training function in its worker: its session, and what it sends to the driver."""
