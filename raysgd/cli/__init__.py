"""The `raysgd` command: checks a machine, shows and analyzes runs, and rewrites programs for `ray.util.sgd`."""
