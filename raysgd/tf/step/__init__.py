"""Where Keras's `fit` is among its steps, and how it continues."""
