"""Encodes training states to send them to other processes, and reads files without running code in them."""
