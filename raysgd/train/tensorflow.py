"""TensorFlow in training functions: `TF_CONFIG` for its strategies, and shards of Ray Data for them.

After a loss all workers are new processes with a new `TF_CONFIG`, as `MultiWorkerMirroredStrategy` needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysgd._optional import require_installed
from raysgd.train._tf_cluster import TensorflowBackend
from raysgd.train.backend import Backend, BackendConfig

require_installed("tensorflow", extra="tf", purpose="`raysgd.train.tensorflow`")


@dataclass
class TensorflowConfig(BackendConfig):
    """Connects the workers by way of `TF_CONFIG`: make a `MultiWorkerMirroredStrategy` in the function."""

    @property
    def backend_cls(self) -> type[Backend]:
        return TensorflowBackend


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """A `tf.data.Dataset` that is a worker's part already, marked so that a strategy does not divide it once more."""
    import tensorflow as tf  # not at the top: the driver, which needs the config only, would wait for it

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options)
