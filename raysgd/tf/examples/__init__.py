"""Example modules, kept for programs that already import them. For examples to run, see the folder `examples`."""
