"""Other tools in runs of `fit()`: MLflow, Weights & Biases, Comet, Keras. Each module needs its package.

The loggers are Ray's. Code that runs in workers is ours, because it needs the rank from our session.
"""
