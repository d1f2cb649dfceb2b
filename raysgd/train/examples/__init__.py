"""Example modules that user code imports. The scripts to run and read are in the folder `examples`."""
