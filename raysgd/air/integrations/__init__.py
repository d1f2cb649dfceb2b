"""Integrations of other tools with `fit()`: MLflow, Weights & Biases, Comet, Keras.

Each module needs the package of its tool. The loggers are imported from Ray. The functions for workers are implemented
here, because they need the rank from raysgd's session.
"""
