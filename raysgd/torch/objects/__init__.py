"""Operations on PyTorch's own objects: models, optimizers, losses, random numbers."""
