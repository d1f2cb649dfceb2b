"""Sockets from each rank to every other: how ranks connect, and what they exchange."""
