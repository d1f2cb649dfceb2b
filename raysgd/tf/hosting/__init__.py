"""Runs an operator in its worker: the steps of a call, and the state between calls."""
