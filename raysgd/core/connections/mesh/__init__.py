"""Sockets between the ranks of a group: how ranks connect, swap bytes, sum arrays, and share a key-value store."""
