"""Example modules that existing user code imports. The repository's folder `examples` has scripts to run and read."""
