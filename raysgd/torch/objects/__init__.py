"""Operations on PyTorch objects: models, optimizers, losses, random number generators."""
