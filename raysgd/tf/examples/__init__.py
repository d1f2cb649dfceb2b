"""Example modules that existing programs import. The scripts to run and read are in the folder `examples`."""
