"""The `raysgd` command: checks a machine, shows the status of runs, and rewrites old programs."""
