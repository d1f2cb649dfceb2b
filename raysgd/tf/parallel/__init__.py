"""Equal copies of a model: gradients, metrics and variables of all workers."""
