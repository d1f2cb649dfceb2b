"""The `raysgd` command: checks a machine, monitors and inspects runs, and rewrites programs for older libraries."""
