"""Rules for all runs of functions in the driver: settings, folders, retries, arrivals of checkpoints."""
