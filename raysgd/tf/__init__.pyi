"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.tf.objects.datasets import prepare_dataset_shard as prepare_dataset_shard
from raysgd.tf.tf_dataset import TFMLDataset as TFMLDataset
from raysgd.tf.tf_trainable import TFTrainable as TFTrainable
from raysgd.tf.tf_trainer import TFTrainer as TFTrainer
from raysgd.tf.training_operator import TrainingOperator as TrainingOperator
