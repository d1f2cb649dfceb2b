"""Other tools in runs of `fit()`: MLflow, Weights & Biases, Comet, Keras. Each module needs its package."""
