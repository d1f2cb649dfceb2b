"""Numbers: averages, timers, merged results, rankings."""
