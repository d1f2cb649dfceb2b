"""Streams over common formats, each read by the library that its users use."""
