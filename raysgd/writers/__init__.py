"""What writes metrics: one writer for each format, for the callbacks of all front ends.

A writer takes reports and a folder or a service, and knows nothing of runs, trainers and callbacks. What it has written
is whole after each report, except for the files of TensorBoard, which follow within two seconds. A writer raises if it
cannot write; its owner decides what that means.
"""
