"""Imports: public names on first use, packages that may be missing, and modules in what is pickled."""
