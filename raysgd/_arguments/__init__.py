"""Arguments: checked before anything starts, or read from a command line."""
