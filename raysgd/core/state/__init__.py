"""Prepares training states to be sent to other processes. The data is copied only once, into memory that is reused."""
