"""Sockets between all pairs of ranks: how ranks connect, and the collectives over the sockets."""
