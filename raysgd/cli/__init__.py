"""The command `raysgd`: checks of a machine, the status of a run, migration."""
