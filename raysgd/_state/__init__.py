"""States on their way between processes: encoded with one copy, in memory that stays warm."""
