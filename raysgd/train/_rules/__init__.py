"""What all runs of functions share in the driver: settings, folders, retries, checkpoints that stay."""
