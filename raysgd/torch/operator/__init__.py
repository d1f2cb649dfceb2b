"""Holds the library's own data about a `TrainingOperator`, and implements `register` and `register_data`."""
