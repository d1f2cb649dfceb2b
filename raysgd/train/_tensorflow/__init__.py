"""What `raysgd.train.tensorflow` is made of: the cluster of workers, checkpoints of Keras."""
