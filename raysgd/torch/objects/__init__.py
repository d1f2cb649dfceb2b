"""PyTorch's own objects by themselves: models, optimizers, losses, random numbers."""
