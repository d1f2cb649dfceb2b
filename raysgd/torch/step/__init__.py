"""One step of the optimizers: gradients, weights of batches, schedulers."""
