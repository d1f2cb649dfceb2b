"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.torch.creator_operator import CreatorOperator as CreatorOperator
from raysgd.torch.torch_trainable import BaseTorchTrainable as BaseTorchTrainable
from raysgd.torch.torch_trainer import TorchTrainer as TorchTrainer
from raysgd.torch.training_operator import TrainingOperator as TrainingOperator
