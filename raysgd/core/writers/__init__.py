"""Sinks: classes that write rows of metrics to a file or a service, one class per format. Logger callbacks use them.

A sink is opened for a run, accepts rows, and is closed. It knows nothing about trainers or callbacks. Its file is
complete after each row, except for TensorBoard files, which background threads open and flush. A sink raises an error
if it cannot write. Callbacks write through a `SafeSink`, which warns instead, so that a failing sink never ends a
training run.
"""
