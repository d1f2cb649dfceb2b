"""Operations on objects of Keras and `tf.data`: models, optimizers, learning rates, names and datasets."""
