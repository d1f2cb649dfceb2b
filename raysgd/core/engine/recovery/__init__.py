"""Runs calls and recovers from failures: a table of states and events, and the class that waits and acts by it."""
