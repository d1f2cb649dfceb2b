"""The parts of `raysgd.train.tensorflow`: the cluster of workers."""
