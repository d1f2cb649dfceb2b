"""Other tools in runs of `fit()`: MLflow, Weights & Biases, Comet, Keras.

Users import them from `raysgd.air.integrations`. The loggers are those of Ray; what runs in a worker is ours, because
it asks our session for its rank.
"""
