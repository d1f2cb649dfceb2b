"""Ray 1.x: TensorFlow on the frames of an `MLDataset`, whose shard follows from `TF_CONFIG`."""

import json
import os

import ray
import ray.util.data as ml_data
import ray.util.iter as parallel_it
from ray.util.sgd.tf.tf_dataset import TFMLDataset
from ray.util.sgd.tf.tf_trainer import TFTrainer


def model_creator(config):
    import tensorflow as tf

    model = tf.keras.models.Sequential(
        [tf.keras.Input(shape=(1,)), tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)]
    )
    model.compile(optimizer=tf.keras.optimizers.Adam(lr=1e-2), loss="mse", metrics=["mae"])
    return model


def make_data_creator(tf_ds: TFMLDataset):
    def data_creator(config):
        world_rank = -1
        if "TF_CONFIG" in os.environ:
            world_rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        return tf_ds.get_shard(shard_index=world_rank).batch(config["batch_size"]).repeat(), None

    return data_creator


ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
num_points = 128
records = parallel_it.from_items([n / num_points for n in range(num_points)], 2, False).for_each(lambda x: [x, x])
frames = ml_data.from_parallel_iter(records, True, batch_size=16, repeated=False)
trainer = TFTrainer(
    model_creator=model_creator,
    data_creator=make_data_creator(frames.to_tf(feature_columns=[0], label_column=1)),
    num_replicas=2,
    config={"batch_size": 8, "fit_config": {"steps_per_epoch": 10}},
)
for _ in range(3):
    print("loss", trainer.train()["train_loss"])
trainer.shutdown()
