"""Rules for all runs of functions in the driver: settings, folders, retries, checkpoints that stay."""
