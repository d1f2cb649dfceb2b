"""Reads files that may come from strangers, without running code that such files contain."""
