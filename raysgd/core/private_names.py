"""A table of the private names of other projects that raysgd uses, and functions to look up such names.

A new version of a project may remove any of these names. Each name therefore has a public alternative, a simpler
fallback, or an error that names the version to install. `find_name` returns None if a name no longer exists;
`require_names` raises an error. Documented names are not listed, even if they look private, such as
`sys._current_frames`, `os._exit`, and `_fields` of a named tuple. `raysgd doctor` lists the names that installed
packages lack, if the packages are newer than the tested versions. `tests/core/test_private_names.py` checks that the
table is complete, and tests what happens without each name.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class PrivateNames:
    """A row of the table: private names of one object in another project, and where raysgd uses them.

    Attributes:
        owner: The module or `module:object` that has the names.
        names: The private names.
        used_in: Modules of `raysgd` that use the names.
        without: What raysgd does if the installed version no longer has one of the names.
    """

    owner: str
    names: tuple[str, ...]
    used_in: str
    without: str

    @property
    def package(self) -> str:
        """The package that the names belong to."""
        return re.split("[.:]", self.owner)[0]


TESTED = {
    "horovod": "0.28.1",
    "keras": "3.15.1",
    "lightning": "2.6.6",
    "ray": "2.60.0",
    "tensorflow": "2.21.0",
    "tf_keras": "2.21.0",
    "torch": "2.13.0",
    "torchmetrics": "1.9.0",
    "transformers": "5.23.0",
}
"""The versions with which raysgd is tested, as in `constraints-dev.txt`."""

_RAISES = "an error names the version"
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
_METRIC = "torchmetrics.metric:Metric"
_OUTPUTS = "transformers.utils.output_capturing"

TABLE = (
    PrivateNames(
        _DDP,
        ("require_forward_param_sync", "require_backward_grad_sync", "parameters_to_ignore", "process_group"),
        "torch.parallel.ddp",
        f"PyTorch would exchange too much or too little: {_RAISES} when a model is wrapped",
    ),
    PrivateNames(
        _DDP,
        ("reducer", "_rebuild_buckets"),
        "train._torch.global_steps",
        "a worker that is lost in the second step of a function restarts it from its checkpoint",
    ),
    PrivateNames(
        "torch.distributed:ProcessGroup",
        ("allgather", "_allgather_base"),
        "torch.step.advice",
        f"gathers of different sizes are not noticed in that way of gathering; without any of them {_RAISES}",
    ),
    PrivateNames(
        "torch.distributed:ProcessGroup",
        ("_get_sequence_number_for_group",),
        "torch.parallel.undo",
        "a function that steps by itself has all its state copied in each batch",
    ),
    PrivateNames(
        "torch",
        ("_foreach_copy_",),
        "torch.parallel.tensor_copies, torch.parallel.undo",
        f"{_RAISES} when a call begins whose batches may be undone",
    ),
    PrivateNames(
        "torch.nn.modules.module:Module",
        ("_buffers",),
        "torch.parallel.undo",
        f"{_RAISES} when a call begins whose batches may be undone",
    ),
    PrivateNames(
        "torch:Tensor",
        ("_version",),
        "torch.objects.filling, torch.objects.remade, torch.objects.criteria, torch.step.gradients",
        f"{_RAISES} when a model on the meta device is registered, and with `remakes_frozen`; labels are counted on a "
        "GPU, which takes longer; accumulated gradients that user code changes in place are not noticed",
    ),
    PrivateNames(
        "torch.nn.modules.activation:MultiheadAttention",
        ("_reset_parameters",),
        "torch.objects.filling",
        "a model on the meta device with such a layer is refused, with the method to write",
    ),
    PrivateNames(
        "torch.nn.modules.module:Module",
        ("_metadata", "_extra_state"),
        "torch.objects.loading",
        "versions of layers that a checkpoint holds are not checked, and extra state is copied like other state",
    ),
    PrivateNames(
        "torch._dynamo.eval_frame:OptimizedModule",
        ("_orig_mod",),
        "torch.objects.criteria, torch.objects.loading",
        "a compiled model takes the checkpoints of compiled models only",
    ),
    PrivateNames(
        "torch.nn.modules.module:Module",
        ("_compiled_call_impl",),
        "torch.objects.criteria",
        "a criterion that was compiled in place is compiled once more",
    ),
    PrivateNames(
        "torch.optim.lr_scheduler:LRScheduler",
        ("_last_lr",),
        "torch.objects.hyperparameters",
        "`get_last_lr()` says the former rate until the next step",
    ),
    PrivateNames(
        "torch.utils.data.dataloader:DataLoader",
        ("_get_iterator",),
        "torch.data.sampling",
        "a subclass of `DataLoader` that defines it is divided like others",
    ),
    PrivateNames("torch", ("_dynamo",), "core.connections._compiler", "workers start in the time that PyTorch takes"),
    PrivateNames(
        "importlib._bootstrap:ModuleSpec",
        ("_initializing",),
        "core.connections._compiler",
        "workers start in the time that PyTorch takes",
    ),
    PrivateNames(
        "torch._compile",
        ("__dynamo_disable",),
        "core.connections._compiler",
        "functions that were disabled before the compiler came stay as they are",
    ),
    PrivateNames(
        "torch",
        ("_utils",),
        "core.connections.torch",
        "an error that PyTorch raises again, of a data loader's process, say, may be taken for a lost connection",
    ),
    PrivateNames(
        "torch._C",
        ("_current_graph_task_id",),
        "torch.parallel.horovod_parallel",
        f"with Horovod, {_RAISES} when workers start",
    ),
    PrivateNames(
        "torch.autograd.variable:Variable",
        ("_execution_engine",),
        "torch.parallel.horovod_parallel",
        f"with Horovod, {_RAISES} when workers start",
    ),
    PrivateNames(
        "torch.optim.lr_scheduler:LRScheduler",
        ("_opt_called",),
        "torch.parallel.horovod_parallel",
        "with Horovod, PyTorch warns that a scheduler stepped before its optimizer",
    ),
    PrivateNames(
        "torch.optim.optimizer:Optimizer",
        ("hooked",),
        "torch.parallel.horovod_parallel",
        "with Horovod, hooks of an optimizer's step are called twice",
    ),
    PrivateNames(
        "horovod.torch.optimizer:_DistributedOptimizer",
        ("_handles",),
        "torch.parallel.horovod_parallel",
        f"with Horovod, {_RAISES} when an optimizer is registered",
    ),
    PrivateNames(
        _OUTPUTS,
        ("_active_collector", "_CAN_RECORD_REGISTRY"),
        "torch.objects.moving",
        "a model that collects outputs is pickled as Python does it, and forgets what to collect",
    ),
    PrivateNames(
        "transformers.modeling_utils:PreTrainedModel",
        ("_can_record_outputs",),
        "torch.objects.moving",
        "a model that was sent to another process forgets what to collect",
    ),
    PrivateNames(
        "datasets.iterable_dataset:IterableDataset",
        ("_ex_iterable", "_formatting"),
        "streams.iterables",
        "rows are formatted one by one, and the dataset is read as one shard",
    ),
    PrivateNames(
        _METRIC,
        ("_computed", "_forward_cache", "_to_sync", "_update_count", "_reductions"),
        "torch.objects.metric_objects",
        f"{_RAISES} when a metric is reported",
    ),
    PrivateNames(
        "lightning.pytorch.core.module:LightningModule",
        ("_lightning_optimizers", "_results"),
        "torch.lightning_operator, torch.lightning.module",
        "`AttributeError` names what a module asks of its trainer",
    ),
    PrivateNames(
        "keras.src.layers.layer:Layer",
        ("_flatten_layers",),
        "tf.objects.registration",
        f"{_RAISES} when a model is registered",
    ),
    PrivateNames(
        "tf_keras.src.engine.base_layer:Layer",
        ("_flatten_layers",),
        "tf.objects.registration",
        f"{_RAISES} when a model is registered",
    ),
    PrivateNames(
        "keras.src.backend.common.global_state",
        ("get_global_attribute",),
        "tf.objects.naming",
        "metrics without a name of their own are called `auc_1` after a second `setup` in a process",
    ),
    PrivateNames(
        "keras.src.trainers.trainer:Trainer",
        ("_compile_config",),
        "tf.parallel.keras_sync",
        "`jit_compile=True` is switched off instead of refused",
    ),
    PrivateNames(
        "tf_keras.src.engine.training:Model",
        ("_steps_per_execution",),
        "tf.objects.registration",
        f"{_RAISES} when a model is trained",
    ),
    PrivateNames(
        "tf_keras.src.mixed_precision.loss_scale_optimizer:LossScaleOptimizerV3",
        ("_loss_scale",),
        "tf.objects.registration",
        f"with `mixed_float16`, {_RAISES} when the state is copied",
    ),
    PrivateNames(
        "keras.src.optimizers.base_optimizer:BaseOptimizer",
        ("_trainable_variables",),
        "tf.parallel.keras_sync",
        f"{_RAISES} when `apply` of an optimizer is called without variables",
    ),
    PrivateNames(
        "tf_keras.src.optimizers.legacy.optimizer_v2:OptimizerV2",
        ("_create_all_weights",),
        "tf.objects.registration, tf.checkpoints.former_optimizer",
        "the state of an optimizer from before Keras 2.11 is made in its first step, and not taken from former files",
    ),
    *(
        PrivateNames(
            f"keras.src.optimizers.{module}",
            names,
            "tf.checkpoints.former_optimizer",
            "a checkpoint of the former library loads without the state of the optimizer, and the log says so",
        )
        for module, names in {
            "adam": ("_momentums", "_velocities", "_velocity_hats"),
            "rmsprop": ("_average_gradients",),
            "adagrad": ("_accumulators",),
            "adadelta": ("_accumulated_grads", "_accumulated_delta_vars"),
            "adamax": ("_m", "_u"),
        }.items()
    ),
    PrivateNames(
        "tensorflow.python.data.ops.dataset_ops:DatasetV2",
        ("_inputs",),
        "tf.objects.datasets",
        f"{_RAISES} when a dataset is registered",
    ),
    PrivateNames(
        "ray._private.state",
        ("actors", "workers"),
        "core.engine.platform, core.engine.placement",
        "a worker that dies before its first answer is missed later, and reservations of a killed driver stay",
    ),
    PrivateNames(
        "ray._private.state",
        ("available_resources_per_node",),
        "core.engine.placement",
        "what is free is known on one node only, so trainers grow there only",
    ),
    PrivateNames(
        "ray._private.state:GlobalState",
        ("get_draining_nodes",),
        "core.engine.placement",
        "workers leave a node that goes away when it is gone, and not before",
    ),
    PrivateNames(
        "ray._private.worker",
        ("print_to_stdstream", "_global_node", "_connect_or_shutdown_lock"),
        "core.engine.placement, core.cluster.ray_session, detached.cluster, detached.protocol",
        "Ray prints what it knows of each lost worker; a detached trainer ends with a program that has started Ray; "
        "`ray.shutdown()` during a background call may end the program",
    ),
    PrivateNames(
        "ray._private.auto_init_hook",
        ("enable_auto_connect",),
        "core.cluster.ray_session",
        "a call in the background may start another Ray after `ray.shutdown()`",
    ),
    PrivateNames(
        "ray._private.authentication.authentication_token_setup",
        ("maybe_enable_token_auth_if_token_available",),
        "core.engine.placement",
        "`RAY_AUTH_MODE=token` has to be set where the cluster has a token",
    ),
    PrivateNames(
        "ray.actor:ActorHandle",
        ("_actor_id",),
        "core.engine.platform, detached.handle",
        "a worker that dies before its first answer is missed later; a killed detached trainer leaves its journal",
    ),
    PrivateNames(
        "ray.tune.trainable.trainable_fn_utils",
        ("_in_tune_session",),
        "air.session",
        "`raysgd.air.session` in a function of Ray Tune has no effect, and warns of it",
    ),
    PrivateNames(
        "ray.train._internal.session",
        ("_session",),
        "train.fit.fit_session",
        "`ray.tune.report` in a function that `fit` runs is an error, which says to use `raysgd.train.report`",
    ),
)


def find_name(path: str) -> Any:
    """Import a module and return an object in it, or None if the module or the object does not exist.

    >>> find_name("os:path.sep"), find_name("os:path._gone.deeper"), find_name("gone:name")
    ('/', None, None)

    Args:
        path: The object as `module:name`, where the name may have several parts.
    """
    module, _, names = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ImportError:
        return None
    for name in names.split("."):
        value = getattr(value, name, None)
    return value


def require_names(owner: Any, *names: str) -> None:
    """Raise an error if an object of another project lacks a name. Use this if results would be wrong without the name.

    Args:
        owner: An object, class or module.
        names: Names that `owner` must have.

    Raises:
        ImportError: A name is missing. The message says which version has it.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        modules = [owner.__name__] if isinstance(owner, ModuleType) else [each.__module__ for each in classes]
        package = next(each for each in (module.partition(".")[0] for module in modules) if each in TESTED)
        raise ImportError(
            f"`{package}` {getattr(sys.modules[package], '__version__', '')} no longer has "
            f"{', '.join(f'`{name}`' for name in missing)}, which raysgd needs to train correctly. "
            f'Run: pip install "{package}<={TESTED[package]}"'
        )


def missing_names(row: PrivateNames) -> list[str]:
    """Return the names in a row of the table that the installed package lacks.

    Return an empty list if the package is not installed. A name counts as present if the owner is loaded and has it, or
    if the name occurs in the source code of the owner's module. This function imports nothing, so import packages with
    compiled modules first: compiled modules have no source code to search.
    """
    package, *parts = row.owner.partition(":")[0].split(".")
    spec = util.find_spec(package)
    text = "" if spec is None else _source(spec.submodule_search_locations or (), parts)
    owner: Any = sys.modules.get(".".join([package, *parts]))
    for each in filter(None, row.owner.partition(":")[2].split(".")):
        owner = getattr(owner, each, None)
    has = [hasattr(owner, name) or re.search(rf"\b{name}\b", text) for name in row.names]
    return [] if spec is None else [name for name, is_there in zip(row.names, has, strict=True) if not is_there]


def _source(folders: Iterable[str], parts: Sequence[str]) -> str:
    places = [Path(folder, *parts) for folder in folders]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return "".join(file.read_text(encoding="utf-8") for file in files)
