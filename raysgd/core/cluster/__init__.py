"""This process in Ray's cluster: its Ray session, its exit, what outlives it, and its lines to workers on its node."""
