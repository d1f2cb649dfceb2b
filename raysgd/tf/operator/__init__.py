"""The internal attributes of a TensorFlow operator, such as its registered objects."""
