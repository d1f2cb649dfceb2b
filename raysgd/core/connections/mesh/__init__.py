"""Sockets between all pairs of ranks: how the ranks connect, and the collectives that use these sockets."""
