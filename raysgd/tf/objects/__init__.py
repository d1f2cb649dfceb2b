"""Operations on Keras's own objects: models, optimizers, losses, random numbers."""
