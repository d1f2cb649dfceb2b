"""Calls of callbacks: those of raysgd, of the old library and of Ray Tune, in their order."""
