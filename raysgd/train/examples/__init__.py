"""Example modules that user code imports from. The scripts to run and to read are in the folder `examples`."""
