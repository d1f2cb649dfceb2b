"""Numbers: averages, timers, results of all workers, rankings."""
