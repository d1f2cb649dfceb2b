"""A training function in its worker: its session, and the messages that it sends to the driver."""
