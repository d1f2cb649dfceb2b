"""Worker processes: where they run, how they are called, what travels between them and the driver."""
