"""Sockets from each rank to every other: how they meet, and what goes over them."""
