"""TensorFlow checkpoint files: written atomically, validated when read."""
