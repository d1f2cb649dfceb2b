"""Encodes training states to send them to other processes, with a single copy, into memory that is reused."""
