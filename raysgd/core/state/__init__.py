"""Encodes training states to send them to other processes. Encoding copies the data at most once."""
