"""Ray 1.x: TensorFlow with creator functions."""

import numpy as np
from ray.util.sgd.tf import TFTrainer


def model_creator(config):
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mean_squared_error")
    return model


def data_creator(config):
    import tensorflow as tf

    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(-1, 1)
    data = tf.data.Dataset.from_tensor_slices((x, 3 * x)).batch(8)
    return data, data


trainer = TFTrainer(model_creator=model_creator, data_creator=data_creator, num_replicas=2, config={})
for _ in range(3):
    print("loss", trainer.train()["train_loss"])
trainer.shutdown()
