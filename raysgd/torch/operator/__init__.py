"""The library's private state for a `TrainingOperator`, and the implementation of `register` and `register_data`."""
