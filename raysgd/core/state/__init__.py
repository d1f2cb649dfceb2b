"""States that travel between processes: encoded with a single copy, into memory that is reused."""
