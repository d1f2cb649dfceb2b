"""The Ray 2.0 import paths of the modules in `raysgd.air.integrations`."""
