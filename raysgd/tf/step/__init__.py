"""The place of Keras's `fit` among its steps, and how it continues."""
