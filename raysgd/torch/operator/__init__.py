"""The library's record of an operator, and the work of `register`."""
