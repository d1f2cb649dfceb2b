"""States that travel between processes: encoded with one copy, into memory that is reused."""
