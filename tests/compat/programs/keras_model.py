"""Ray 1.x: TensorFlow with creator functions, options of `fit` and `evaluate`, and a callback of Keras."""

import numpy as np
from ray.util.sgd.tf.tf_trainer import TFTrainer


def model_creator(config):
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.SGD(config["lr"]), loss="mean_squared_error", metrics=["mae"])
    return model


def data_creator(config):
    import tensorflow as tf

    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(-1, 1)
    data = tf.data.Dataset.from_tensor_slices((x, 3 * x)).repeat().batch(config["batch_size"])
    return data, data


def create_config(batch_size):
    import tensorflow as tf

    return {
        "batch_size": batch_size,
        "lr": 0.1,
        "fit_config": {
            "steps_per_epoch": 64 // batch_size,
            "epochs": 2,
            "callbacks": [tf.keras.callbacks.EarlyStopping(monitor="loss", patience=5)],
            "verbose": 0,
        },
        "evaluate_config": {"steps": 64 // batch_size, "verbose": 0},
    }


trainer = TFTrainer(
    model_creator=model_creator,
    data_creator=data_creator,
    num_replicas=2,
    use_gpu=False,
    verbose=True,
    config=create_config(8),
)
print("loss", trainer.validate()["validation_loss"])
for _ in range(2):
    print("loss", trainer.train()["train_loss"])
assert len(trainer.validate()) == 2
assert trainer.get_model().count_params() == 2
trainer.shutdown()
