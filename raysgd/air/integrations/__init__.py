"""Integrations of other tools with `fit()`: MLflow, Weights & Biases, Comet, Keras.

Each module needs its tool's package.

The loggers come from Ray. Code that runs in workers is raysgd's, because it needs the rank from raysgd's session.
"""
