"""Trains a Keras model on two workers. Stops early, logs to a file, and keeps the best checkpoint.

Data: the 1,797 handwritten digits of scikit-learn. Packages: the extra `tf`, scikit-learn.
"""

import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras

from raysgd import TFTrainer
from raysgd.callbacks import Checkpointing, CSVLogger, EarlyStopping


def make_model(config):
    model = keras.Sequential(
        [
            keras.layers.Input([8, 8, 1]),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPool2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(config["lr"]), loss=loss, metrics=["accuracy"])
    return model


def make_data(config):
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels / 16).reshape(-1, 8, 8, 1).astype("float32")
    train = tf.data.Dataset.from_tensor_slices((images[360:], digits[360:])).shuffle(1437)
    validation = tf.data.Dataset.from_tensor_slices((images[:360], digits[:360]))
    return train.batch(64), validation.batch(64)  # 64 images per step, over all workers


saving = Checkpointing("checkpoints", metric="val_accuracy", restore_best_at_end=True)
callbacks = [EarlyStopping("val_loss", patience=3), saving, CSVLogger("metrics.csv")]
with TFTrainer(make_model, make_data, config={"lr": 0.003}, num_workers=2, seed=0) as trainer:
    history = trainer.fit(40, callbacks=callbacks)
    trainer.get_model().save("digits.keras")  # the best checkpoint, not the last
print(history)
print(f"{history.stop_reason}; accuracy {saving.best_score:.3f}; the model is in digits.keras")
