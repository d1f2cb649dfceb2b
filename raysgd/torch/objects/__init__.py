"""Functions that inspect and change PyTorch objects: models, optimizers, losses and random number generators."""
