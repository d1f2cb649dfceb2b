"""Example modules that user code imports. The scripts to run and to read are in the folder `examples`."""
