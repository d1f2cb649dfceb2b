"""The command `raysgd`: checks a machine, shows the status of runs, and rewrites old programs."""
