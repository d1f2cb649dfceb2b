"""A training function in its worker: the session that it calls, and what it hands over."""
