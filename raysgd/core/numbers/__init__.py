"""Averages of metrics, timers, merged results of workers, rankings of checkpoints, and random seeds."""
