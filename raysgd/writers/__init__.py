"""Sinks for metrics: one for each format, for the callbacks of all front ends.

A sink is opened for a run, takes rows, and is closed. It knows nothing of trainers and callbacks. What it has written
is whole after each row, except for the files of TensorBoard, which follow within two seconds. A sink raises if it
cannot write. Its owner writes through a `SafeSink`, which warns instead: no failure of a sink ends a training.
"""
