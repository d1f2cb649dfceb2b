"""Holds what the library needs to know about a `TrainingOperator`, and implements `register` and `register_data`."""
