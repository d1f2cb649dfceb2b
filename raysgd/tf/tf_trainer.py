"""`TFTrainer`: the driver's handle for N replicas of Keras models.

The trainer checks arguments, converts calls to requests to the workers, and merges the results. Unless rank 0 runs in
the driver, the driver does not load TensorFlow until you request a model.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from raysgd.compat.names import former_names
from raysgd.core import arguments as checks
from raysgd.core.imports import require_installed
from raysgd.core.text.log_lines import errors_printable
from raysgd.core.text.tracebacks import hide_library_frames
from raysgd.storage import files
from raysgd.tf import driver
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.driver import TFFramework
from raysgd.tf.objects import registration
from raysgd.tf.tf_runner import TFRunner
from raysgd.tf.training_operator import TFSettings
from raysgd.trainer.configuration import BatchOptions, GroupSettings, Placement, Recovery, chosen
from raysgd.trainer.driver.live_changes import begin_again
from raysgd.trainer.driver.trainer import ClassTrainer
from raysgd.trainer.worker.operator import OperatorT
from raysgd.trainer.worker.replica_state import RESUME
from raysgd.utils import BATCH_SIZE

if TYPE_CHECKING:
    from raysgd.detached.protocol import Detached

logger = logging.getLogger(__name__)


@hide_library_frames
class TFTrainer(ClassTrainer[OperatorT]):
    """Trains Keras models, of Keras 3 or tf_keras, on one or many workers.

    Pass either an operator class, or two functions, `model_creator` and `data_creator`. With creators, the model is
    trained with Keras's own `fit`.

    Args: What is trained
        model_creator: Function of `config` that returns a compiled Keras model.
        data_creator: Function of `config` that returns the training dataset and the test dataset. The test dataset may
            be None. A batch of these datasets is a global batch.
        training_operator_cls: A subclass of `raysgd.tf.TrainingOperator`, to pass instead of the creators.
        config: Passed to the creators or to the operator. For creators, `fit_config` and `evaluate_config` contain
            options for `fit` and `evaluate`. For operators, the key `BATCH_SIZE` may hold the global batch size.
        seed: Seed for the initial weights and the order of shuffled datasets. Default: a random seed.
        verbose: Verbosity of Keras's `fit` and `evaluate` on rank 0, with creators. Other ranks print nothing.

    Args: Where it runs
        num_workers: Number of workers. After failures, there may temporarily be fewer. Default: 1.
        num_replicas: Older name of `num_workers`.
        num_cpus_per_worker: Number of CPUs to reserve per worker, and the worker's number of threads.
        use_gpu: True to reserve a GPU for each worker. "auto" to go by the cluster: a GPU for each worker; if there are
            fewer GPUs, at most 4 workers share one; without GPUs, workers train on CPUs.
        resources_per_worker: Custom Ray resources for each worker, such as `{"fast_disk": 1}`.
        accelerator_type: The type of GPU that workers need, by its name in Ray, such as "A100".
        placement_strategy: "PACK" places workers on as few nodes as possible, "SPREAD" on as many as possible. By
            default, workers with GPUs are packed, so that most traffic stays inside a node. Without GPUs, workers are
            spread.
        runtime_env: Ray runtime environment of the worker processes. Default: the job's runtime environment. It does
            not apply to a worker in the driver.
        initialization_hook: Function without arguments to call in each worker process before anything else.
        timeout_s: Seconds that a worker may wait for other workers in a collective, before the collective fails.
        use_local: Whether to run rank 0 in this process. With `num_workers=1`, you then do not need Ray, and can use a
            debugger.
        detached: A name or a `raysgd.Detached`, to let the trainer outlive this program. You then get a handle with the
            same methods. See `docs/detached.md`.

    Args: What a step computes
        split_batches: If False, a batch of an operator's dataset is for one worker, unless the dataset is registered
            with another `sharding`. If True, each batch is a global batch and `config[BATCH_SIZE]` is its size, for any
            number of workers. With creators, each batch is always a global batch. Default: False, and the log says what
            a batch is if its size is known.

    Args: What follows a failure
        recovery: A `raysgd.Recovery` with timeouts and the rules for restarts and snapshots.
        min_workers: Minimum number of workers. With fewer workers, the trainer waits for resources.
        spare_workers: Number of extra workers that stand by to replace lost workers. They occupy resources. Meanwhile,
            `validate(blocking=False)` and `fit(validate="async")` run each validation on one of them, while the other
            workers train.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.
        ImportError: TensorFlow is not installed.
        ReservationTimeoutError: The cluster did not provide the resources in time. This is also a `TimeoutError`.
        WorkerError: The user's `setup` failed. The error is also an instance of the class that `setup` raised.

    Examples:
        >>> trainer = TFTrainer(make_model, make_data, config={"fit_config": {"epochs": 2}}, num_replicas=2)
        ... # doctest: +SKIP
        >>> trainer.train()["train_loss"], trainer.validate()["validation_loss"]  # doctest: +SKIP
    """

    seed: int
    verbose: bool | int | str

    def __init__(
        self,
        model_creator: Callable[[dict[str, Any]], Any] | None = None,
        data_creator: Callable[[dict[str, Any]], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        num_replicas: int | None = None,
        num_cpus_per_worker: float = 1,
        use_gpu: bool | Literal["auto"] = False,
        verbose: bool | int | str = False,
        *,
        training_operator_cls: type[OperatorT] | None = None,
        num_workers: int | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        accelerator_type: str | None = None,
        placement_strategy: Literal["PACK", "SPREAD"] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        split_batches: bool | None = None,
        initialization_hook: Callable[[], Any] | None = None,
        timeout_s: float = 1800.0,
        seed: int | None = None,
        use_local: bool = False,
        min_workers: int = 1,
        spare_workers: int = 0,
        recovery: Recovery = Recovery(),
        detached: str | Detached | None = None,
        **unknown: NoReturn,
    ) -> None:
        given = locals()
        checks.refuse_unknown("TFTrainer", unknown, TFTrainer.__init__.__annotations__, recovery=Recovery)
        if use_gpu != "auto":
            checks.refuse_text(use_gpu=use_gpu)
        num_workers = driver.resolve_num_workers(num_workers, num_replicas)
        settings = chosen(
            TFSettings,
            given,
            training_operator_cls=driver.resolve_operator(training_operator_cls, model_creator, data_creator),
            config=checks.check_config(config),
            use_gpu=False,
            seed=random.SystemRandom().randrange(2**31) if seed is None else seed,
            batch_options=chosen(BatchOptions, given, split_batches=False if split_batches is None else split_batches),
            num_workers=num_workers,
        )
        self._trains_with_fit = issubclass(settings.training_operator_cls, CreatorOperator)
        placement = chosen(Placement, given)
        group = chosen(GroupSettings, given, num_workers=num_workers, backend="sockets", placement=placement)
        group.refuse_spares((), "workers outside the driver, `Recovery(in_place=True)`")
        if recovery.undo is True:
            raise ValueError("`undo=True` works with `TorchTrainer` only: omit it.")
        driver.check_config(settings, num_workers)
        require_installed("tensorflow", extra="tf", purpose="`TFTrainer`")
        num_gpus = driver.choose_num_gpus(use_gpu, group)
        group, settings = replace(group, num_gpus_per_worker=num_gpus or 1), replace(settings, use_gpu=num_gpus > 0)
        self.model_creator, self.data_creator = model_creator, data_creator
        has_chosen = split_batches is not None
        super().__init__(group, settings, TFFramework(group, settings), has_chosen_batches=has_chosen)

    def _reset_creators(self, model_creator: Any, data_creator: Any, config: Mapping[str, Any]) -> None:
        """Create the operators in all workers again, like `reset_config`, but with new creator functions and config."""
        operator_cls = driver.resolve_operator(None, model_creator, data_creator)
        begin_again(self._life, config, operator_cls)
        self.model_creator, self.data_creator = model_creator, data_creator

    @property
    def config(self) -> dict[str, Any]:
        """The operator's config. `BATCH_SIZE` is the actual number of samples per step, which may have been rounded."""
        config = dict(self._life.settings.config)
        if BATCH_SIZE in config and not self._trains_with_fit:
            config[BATCH_SIZE] = self._life.settings.batch_options.global_size(config[BATCH_SIZE], self.max_replicas)
        return config

    def get_model(self, custom_objects: Mapping[str, Any] | None = None) -> Any:
        """Return a copy of the trained model, or a list of models, in the driver.

        With creators, this calls `model_creator`. With an operator, the models are rebuilt from their Keras
        configurations, and are compiled if the operator's models are compiled. The trained weights are then loaded into
        the models. A compiled model has the trained optimizer state if its optimizer is a registered one.

        Args:
            custom_objects: Your classes and functions, by name, that Keras needs to rebuild a model.
        """
        state = self.state_dict()
        if self._trains_with_fit:
            operator_cls: Any = self.training_operator_cls
            model = operator_cls._model_creator(dict(self._life.settings.config))
            self._load_into(model, state, 0)
            return model
        models = []
        for index, (config, is_own) in enumerate(self._life.on_all(TFRunner.architecture, rank=0)[0]):
            models.append(registration.model_from_json(config, custom_objects))
            self._load_into(models[-1], state if is_own else {**state, "optimizers": []}, index)
        return models[0] if len(models) == 1 else models

    def _load_into(self, model: Any, state: Mapping[str, Any], index: int) -> None:
        weights, slots = state["models"][index], state["optimizers"]
        if not model.weights:
            registration.build_model(model, self._life.of_first("operator.train_dataset.element_spec"))
        model.set_weights(weights)
        registration.take_weights_in(model)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and len(slots) == len(state["models"]):
            registration.build_optimizer(optimizer, model.trainable_variables)
            variables = registration.variables_of_optimizer(optimizer)
            # Keras may rebuild the model without its wrapper for loss scaling, whose variables come first.
            for variable, value in zip(variables, slots[index][-len(variables) :], strict=True):
                variable.assign(value)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state: the epoch, the operator's own state, and the models' and optimizers' arrays."""
        state = self._life.snapshot().shared_state
        return {key: copy.deepcopy(value) for key, value in state.items() if key != RESUME}

    def save(self, checkpoint: str | PathLike[str], blocking: bool = True) -> Any:
        """Write the state to a file from the driver, atomically and with checksums. `numpy.load` can read its arrays.

        Args:
            checkpoint: A path, or the URI of a file in a store, such as `s3://bucket/last`.
            blocking: If False, return once the state is copied, and transfer and write it in the background. The next
                `save` or `shutdown` raises any error of the background save. If the worker with the copy is lost before
                the transfer, the file is not written and the failure is logged. `shutdown` then raises an error unless
                a later `save` succeeded.

        Returns:
            `checkpoint`.

        Raises:
            ValueError: The operator's own state contains an object that cannot be stored without pickling. Or
                `checkpoint` is not the location of a file, or has one of Keras's suffixes.
            OSError: The file could not be written. For a URI, this is a `StorageError`. The training is unaffected.
        """
        files.check_location("checkpoint", checkpoint)
        driver.refuse_keras_file(checkpoint)
        checks.refuse_text(blocking=blocking)
        return self._life.save(checkpoint, self._life.framework.content_of, blocking, self)

    @errors_printable()
    def load(self, checkpoint: str | PathLike[str]) -> None:
        """Load a file written by `save`, or by `ray.util.sgd`, into all workers.

        If a file written by `ray.util.sgd` has optimizer state that does not match the optimizer, a warning is logged
        and the optimizer is unchanged.

        Args:
            checkpoint: A path or a URI.

        Raises:
            FileNotFoundError: The file does not exist.
            StorageError: The store could not be reached. This is also an `OSError`.
            CheckpointCorruptedError: The file is truncated or was modified.
            ValueError: The file does not match the operator. The workers' state is unchanged.
        """
        files.check_location("checkpoint", checkpoint)
        with files.local_copy(checkpoint) as path:
            state = checkpoint_file.read(path, name=files.shown(checkpoint))
        rank_states = state.pop(driver.RANKS, ())
        if not isinstance(rank_states, list | tuple):
            raise ValueError(f"`{files.shown(checkpoint)}`: the random states are not a list. Nothing was loaded.")
        former = state.pop(checkpoint_file.FORMER_OPTIMIZER, None)
        if former is None:
            driver.load(self._life, state, tuple(rank_states))
        else:
            self._load_former(checkpoint, state, former)
        self._life.saves.note_file(files.shown(checkpoint))

    restore = load

    def _load_former(self, checkpoint: str | PathLike[str], state: dict[str, Any], optimizer: list[Any]) -> None:
        slots = self._life.on_all(TFRunner.former_optimizer, optimizer, rank=0)[0]
        whole = {**self.state_dict(), **state, **({} if slots is None else {"optimizers": [slots]})}
        driver.load(self._life, whole, ())
        if slots is None:
            logger.warning(
                "`%s` is a file of the old library and does not match this trainer's optimizer: the weights and the "
                "epoch were loaded, but the optimizer is unchanged",
                files.shown(checkpoint),
            )


former_names(__name__)
