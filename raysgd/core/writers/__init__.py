"""Sinks for metrics, one for each format. The callbacks of all front ends use them.

A sink is opened for a run, takes rows, and is closed. It knows nothing of trainers and callbacks. Its file is complete
after each row, except those of TensorBoard, which follow within two seconds. A sink raises an error if it cannot write.
Its owner writes through a `SafeSink`, which warns instead, so that no failure of a sink ends a training.
"""
