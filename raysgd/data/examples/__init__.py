"""Example modules that user code imports from. The example scripts are in the folder `examples`."""
