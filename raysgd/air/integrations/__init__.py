"""Other tools in runs of `fit()`: MLflow, Weights & Biases, Comet, Keras. Each module needs its package.

The loggers are those of Ray; what runs in a worker is ours, because it asks our session for its rank.
"""
