"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.train._torch.checkpoint import TorchCheckpoint as TorchCheckpoint
from raysgd.train._torch.checkpoint import TorchPredictor as TorchPredictor
from raysgd.train._torch.global_steps import step_committed as step_committed
from raysgd.train._torch.loaders import prepare_data_loader as prepare_data_loader
from raysgd.train._torch.prepared import TorchWorkerProfiler as TorchWorkerProfiler
from raysgd.train._torch.prepared import accelerate as accelerate
from raysgd.train._torch.prepared import backward as backward
from raysgd.train._torch.prepared import enable_reproducibility as enable_reproducibility
from raysgd.train._torch.prepared import gather_state as gather_state
from raysgd.train._torch.prepared import get_device as get_device
from raysgd.train._torch.prepared import get_devices as get_devices
from raysgd.train._torch.prepared import load_state as load_state
from raysgd.train._torch.prepared import prepare_model as prepare_model
from raysgd.train._torch.prepared import prepare_optimizer as prepare_optimizer
from raysgd.train._torch.prepared import prepare_state as prepare_state
from raysgd.train._torch.process_group import TorchBackend as TorchBackend
from raysgd.train._torch.process_group import TorchConfig as TorchConfig
from raysgd.train.data_parallel_trainer import TorchTrainer as TorchTrainer
