"""Reads untrusted files without running code in them."""
