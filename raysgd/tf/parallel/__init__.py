"""How the copies of a model are kept equal: gradients, metrics and variables of all workers."""
