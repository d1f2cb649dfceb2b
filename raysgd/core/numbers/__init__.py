"""Averages, timers, merged results and rankings."""
