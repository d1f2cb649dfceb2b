"""Imports: public names on first use, and packages that may be missing."""
