"""`TorchTrainer`: the driver's handle on N replicas of a `TrainingOperator`.

A front end: it checks arguments, turns calls into requests for the engine, and merges what comes back. Workers, Ray and
failures are the engine's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from raysgd._batching import split_batch_size
from raysgd._class_trainer import ClassTrainer
from raysgd.backends.torch import TorchBackend
from raysgd.engine import results
from raysgd.engine.controller import Call, ElasticController
from raysgd.engine.epochs import EpochAnswer, EpochRequest, Progress, merged
from raysgd.engine.policies import ScalingPolicy
from raysgd.engine.snapshots import Snapshot
from raysgd.engine.types import Resources, World
from raysgd.engine.worker_group import GroupSpec
from raysgd.exceptions import InvalidCountError, UnevenStepsError
from raysgd.torch import arguments, checkpoint_file, constants
from raysgd.torch.precision import choose_amp_backend
from raysgd.torch.progress import ProgressBar
from raysgd.torch.state_codec import StateEncoder, decode
from raysgd.torch.torch_runner import (
    RESUME,
    RunnerFacts,
    RunnerSpec,
    TorchRunner,
)
from raysgd.torch.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)

_RNG = "rng"


class TorchTrainer(ClassTrainer):
    """Trains a `TrainingOperator` on one or many workers.

    Args:
        training_operator_cls: The operator class, not an instance.
        initialization_hook: Called without arguments in each worker process before anything else, to set environment
            variables for instance.
        config: Passed to the operator. Under the key `BATCH_SIZE` it may hold the batch size of all workers together.
        num_workers: How many workers to train with. After losses there may be fewer for a while.
        num_cpus_per_worker: CPUs to reserve for each worker, and its number of threads.
        use_gpu: True reserves one GPU for each worker; "auto" does so if the driver sees one.
        backend: "nccl", "gloo", or "auto" (NCCL with GPUs, else gloo).
        wrap_ddp: Whether registered models are wrapped in `DistributedDataParallel`.
        timeout_s: Seconds that a collective may take. With NCCL the default comes from the environment variable
            NCCL_TIMEOUT_S.
        use_fp16: True for PyTorch's own mixed precision, "apex" for Apex.
        use_tqdm: Whether to show a progress bar in `train`.
        add_dist_sampler: Whether registered loaders over map-style datasets are divided over the workers.
        scheduler_step_freq: When the library steps the learning-rate scheduler: "batch", "epoch", or "manual" for
            never.
        use_local: Run rank 0 in this very process. With `num_workers=1` no Ray is needed, and a debugger works.

    Raises:
        ValueError, TypeError: An argument is wrong; nothing was started.
        DeprecationWarning: An argument that older versions of the API had.
        ReservationTimeoutError: The cluster did not grant the resources; a `TimeoutError`.
        WorkerError: The user's set-up failed; also of the class that it raised.

    Example:
        >>> from raysgd.operators import ClassificationOperator  # doctest: +SKIP
        >>> trainer = TorchTrainer(training_operator_cls=MyOperator, num_workers=2)  # doctest: +SKIP
        >>> for _ in range(5):  # doctest: +SKIP
        ...     print(trainer.train(), trainer.validate())
    """

    def __init__(
        self,
        *,
        training_operator_cls: type[TrainingOperator],
        initialization_hook: Callable[[], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        use_gpu: bool | str = "auto",
        backend: str = "auto",
        wrap_ddp: bool = True,
        timeout_s: float | None = None,
        use_fp16: bool | str = False,
        use_tqdm: bool = False,
        add_dist_sampler: bool = True,
        scheduler_step_freq: str | None = None,
        use_local: bool = False,
        model_creator: Any = None,
        data_creator: Any = None,
        optimizer_creator: Any = None,
        scheduler_creator: Any = None,
        loss_creator: Any = None,
        num_replicas: Any = None,
        batch_size: Any = None,
        apex_args: Any = None,
        serialize_data_creation: Any = None,
        data_loader_args: Any = None,
        **unknown: Any,
    ) -> None:
        arguments.check_count(
            "num_workers", num_workers, hint="To run without Ray actors pass `use_local=True` with `num_workers=1`."
        )
        arguments.refuse_creators(model_creator, data_creator, optimizer_creator, scheduler_creator, loss_creator)
        if use_local:
            arguments.check_use_local(num_workers)
        if num_workers > 1 and not torch.distributed.is_available():
            raise ValueError(
                f"`num_workers={num_workers}`: this build of PyTorch has no `torch.distributed`; it can use 1."
            )
        arguments.refuse_retired(num_replicas=num_replicas, batch_size=batch_size, apex_args=apex_args)
        if serialize_data_creation is True:
            logger.warning(
                "`serialize_data_creation` of the trainer has no effect; `TrainingOperator.from_creators` has it"
            )
        arguments.refuse_retired(data_loader_args=data_loader_args or None)
        arguments.validate_scheduler_step_freq(scheduler_step_freq)
        arguments.refuse_unknown(unknown, TorchTrainer.__init__.__annotations__)
        arguments.check_operator_class(training_operator_cls)
        arguments.check_kinds(config, initialization_hook, num_cpus_per_worker)
        choose_amp_backend(use_fp16)
        if use_tqdm:
            arguments.check_tqdm()

        self.training_operator_cls = training_operator_cls
        self.initialization_hook = initialization_hook
        self.num_cpus_per_worker = num_cpus_per_worker
        self.use_gpu = arguments.resolve_use_gpu(use_gpu)
        self.backend = arguments.resolve_backend(backend, self.use_gpu)
        self.max_replicas = num_workers
        self.serialize_data_creation = serialize_data_creation
        self.wrap_ddp = wrap_ddp
        self.timeout_s = arguments.resolve_timeout(timeout_s, self.backend)
        self.use_fp16 = use_fp16
        self.use_tqdm = use_tqdm
        self.add_dist_sampler = add_dist_sampler
        self.use_local = use_local
        self.scheduler_step_freq = scheduler_step_freq
        self._requested_config = dict(config or {})
        self._check_batch_size()
        self._writer = checkpoint_file.AsyncWriter()
        self._begin(self._make_controller())
        self._check_same_data(("train_data", "validation_data"), "pass `add_dist_sampler=False`")

    def _make_controller(self) -> ElasticController:
        spec = RunnerSpec(
            operator_cls=self.training_operator_cls,
            config=self._requested_config,
            use_gpu=self.use_gpu,
            use_fp16=self.use_fp16,
            use_tqdm=self.use_tqdm,
            wrap_ddp=self.wrap_ddp,
            add_dist_sampler=self.add_dist_sampler,
            scheduler_step_freq=self.scheduler_step_freq,
            use_local=self.use_local,
        )
        group = GroupSpec(
            backend=TorchBackend(self.backend, self.timeout_s),
            make_replica=partial(TorchRunner, spec),
            resources=Resources(self.num_cpus_per_worker, int(self.use_gpu)),
            use_local=self.use_local,
            initialization_hook=self.initialization_hook,
            reservation_timeout_s=constants.SGD_PLACEMENT_GROUP_TIMEOUT_S,
            captures=not (self.use_local and self.max_replicas == 1),
        )
        scaling = ScalingPolicy(max_workers=self.max_replicas, num_local=int(self.use_local))
        return ElasticController(group, scaling, release_timeout_s=constants.SGD_PLACEMENT_GROUP_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------ epochs

    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: Mapping[str, Any] | None = None,
        dataset: Any = None,
    ) -> Any:
        """Trains for one pass over the data, or for `num_steps` batches per worker.

        Args:
            num_steps: Batches per worker. The next call goes on where this one stops; passes follow one another.
            profile: Whether to add `profile`, the mean seconds of the phases of a single worker.
            reduce_results: Whether to merge the workers' metrics; False returns a list with one dict per worker.
            max_retries: How many times this call is run again after a loss of workers.
            info: Handed to the operator.
            dataset: Trained on instead of the registered loader, for this call: has `set_num_shards(n)` and
                `get_shard(i)`.

        Returns:
            `num_samples`, `epoch`, `batch_count`, and each metric's mean over the samples and its last value.

        Raises:
            InvalidCountError: `max_retries` is negative, or `num_steps` is no count.
            WorkerError: The operator raised; also of the class that it raised. Never retried.
            WorkersLostError: Workers were lost and the retries are used up.
        """
        if not isinstance(max_retries, int) or max_retries < 0:
            raise InvalidCountError(
                f"`max_retries={max_retries!r}`: need 0 (fail at the first loss of a worker) or more."
            )
        arguments.check_num_steps(num_steps)
        with ExitStack() as stack:
            bar = stack.enter_context(ProgressBar()) if self.use_tqdm else None
            tick = (lambda: bar.show(self._progress())) if bar is not None else None
            requests = partial(self._requests, num_steps, profile, dict(info or {}), dataset, tick)
            call = Call(TorchRunner.train_epoch, requests, changes_state=True, tick=tick)
            answers: list[EpochAnswer] = self._controller.run(call, max_retries=max_retries)
            self._check_even_steps(answers)
            result = merged(answers, reduce_results)
            if bar is not None:
                bar.show(_end_of(answers[0], info or {}))
        return result

    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Evaluates on the validation loader, every sample once; arguments and result as in `train`, no `epoch`."""
        arguments.check_num_steps(num_steps)
        requests = partial(self._requests, num_steps, profile, dict(info or {}), None, None)
        call = Call(TorchRunner.validate, requests, changes_state=self._facts.keeps_own_state)
        answers = self._controller.run(call)
        self._controller.touch()  # it may have drawn random numbers, which `save` keeps
        return merged(answers, reduce_results)

    def _requests(
        self,
        num_steps: int | None,
        profile: bool,
        info: dict[str, Any],
        dataset: Any,
        tick: Callable[[], None] | None,
        worlds: Sequence[World],
    ) -> list[tuple[EpochRequest]]:
        """One request for each rank. Made anew for every attempt, because the number of workers may have changed."""
        request = EpochRequest(num_steps, info, profile, self._facts.seed)
        requests = [(request,)] * len(worlds)  # one object: the engine then packs it once for all ranks
        if dataset is not None:
            dataset.set_num_shards(len(worlds))
            requests = [(replace(request, shard=dataset.get_shard(world.rank)),) for world in worlds]
        if self.use_local:
            requests[0] = (replace(requests[0][0], tick=tick),)
        return requests

    def _progress(self) -> Any:
        transfer = self._controller.group.beside(0, TorchRunner.progress)
        try:
            return transfer.result(1.0)
        except Exception as error:  # a bar is not worth a failure; the call itself reports the loss of the worker
            logger.debug("no news for the progress bar: %s", error)
            return None

    def _check_even_steps(self, answers: Sequence[EpochAnswer]) -> None:
        """An epoch of replicas that step together counts only when all took the same steps."""
        counts = [answer.num_steps for answer in answers]
        if self._facts.is_synchronous and len(set(counts)) > 1:
            raise UnevenStepsError(
                f"The workers drew {counts} batches: replicas under `DistributedDataParallel` must take the same "
                "number of steps. "
                "Let `train_epoch` consume its iterator alike on all ranks, or pass `wrap_ddp=False` and keep them "
                "equal yourself."
            )

    # ------------------------------------------------------------------------------------------------ functions

    def get_local_operator(self) -> TrainingOperator:
        """The live operator of rank 0, with `use_local=True` only.

        Raises:
            NotImplementedError: All workers are remote.
        """
        operator: TrainingOperator = super().get_local_operator()
        return operator

    def update_scheduler(self, metric: Any) -> None:
        """Steps every registered scheduler with `metric`, as `ReduceLROnPlateau` wants it."""
        call = Call(TorchRunner.update_schedulers, lambda worlds: [(metric,)] * len(worlds), changes_state=True)
        self._controller.run(call)

    # ------------------------------------------------------------------------------------------------ state

    def get_model(self, to_cpu: bool = False) -> Any:
        """The trained model, or a list of models, without any wrapper.

        From remote workers it is a copy; with `use_local=True` it is the live model, unless `to_cpu` asks for a copy.
        """
        is_local = self._controller.group.local_replica is not None
        call = Call(TorchRunner.models, lambda worlds: [(to_cpu or not is_local,)] * len(worlds), rank=0)
        models = self._controller.run(call)[0]
        if self.use_gpu and torch.cuda.is_available() and not to_cpu:
            models = [model.cuda() for model in models]
        return models[0] if len(models) == 1 else models

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: epoch, operator, models, optimizers, schedulers, and of mixed precision."""
        state = decode(self._controller.snapshot().shared_state, copy=True)
        del state[RESUME]
        return dict(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Loads such a state into all workers; returns when they have it.

        Args:
            state_dict: What `state_dict` returned, here or in another trainer with any number of workers.
            blocking: Accepted for compatibility: loading always waits, so that an error is not lost.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered; the workers are as they were.
        """
        self._load(dict(state_dict), is_ours=False)

    def save(self, checkpoint: Any, blocking: bool = True, weights_only: bool = True) -> Any:
        """Writes the state to a file of the driver, atomically, with a checksum. `torch.load` reads it too.

        Args:
            checkpoint: The path.
            blocking: False returns once the state is copied and writes in the background; an error is raised by the
                next `save` or by `shutdown`.
            weights_only: False lets the operator's own state hold any object; such a file needs `load(...,
                weights_only=False)`.

        Returns:
            `checkpoint`.

        Raises:
            ValueError: The operator's own state could not be loaded back; the message names the key.
        """
        snapshot = self._controller.snapshot()
        state = decode(snapshot.shared_state, copy=False)
        state[RESUME] = {**state[RESUME], _RNG: list(snapshot.rank_states)}
        state = checkpoint_file.check_loadable(state, allow_pickle=not weights_only)
        if blocking:
            self._writer.wait()
            checkpoint_file.write(checkpoint, state)
        else:
            self._writer.submit(checkpoint, partial(_first, state, snapshot))  # the state is a view of the snapshot
        return checkpoint

    def load(self, checkpoint: Any, weights_only: bool = True) -> None:
        """Loads a file that `save` wrote, or that the old library wrote, into all workers.

        Args:
            checkpoint: The path.
            weights_only: False also unpickles arbitrary objects. Only for files that you trust.

        Raises:
            FileNotFoundError: There is no such file.
            CheckpointCorruptedError: The file is truncated or was changed.
            ValueError, KeyError: The file does not fit; the workers are as they were.
        """
        self._load(checkpoint_file.read(checkpoint, weights_only=weights_only), is_ours=True)

    def restore(self, *args: Any) -> None:
        """Retired.

        Raises:
            DeprecationWarning: Always.
        """
        raise DeprecationWarning("`TorchTrainer.restore` was renamed: use `load`.")

    def _load(self, state: dict[str, Any], is_ours: bool) -> None:
        """Loads into all workers; a state that is ours alone may be used up."""
        _check_parts(state, self._facts)
        resume = dict(state.get(RESUME) or {})
        rank_states = tuple(resume.pop(_RNG, ()))
        whole = {**state, RESUME: resume}
        if self._controller.group.is_driver_only:
            self._controller.run(Call(TorchRunner.restore, lambda worlds: [(whole, rank_states, is_ours)]))
            self._controller.touch()
            return
        encoded = StateEncoder().encode(whole)
        # A file of this very group leaves nothing out: afterwards it is what the workers have.
        is_complete = is_ours and len(rank_states) == self.num_workers
        call = Call(
            TorchRunner.restore,
            lambda worlds: [(shared, rank_states) for shared in self._controller.group.share(encoded)],
            changes_state=not is_complete,
        )
        self._controller.run(call)
        if is_complete:
            self._controller.adopt(Snapshot(encoded, rank_states))

    # ------------------------------------------------------------------------------------------------ life

    def shutdown(self, force: bool = False) -> None:
        """Ends the workers and gives their resources back; a second time it does nothing.

        Args:
            force: End the processes at once instead of letting them close first.
        """
        try:
            super().shutdown(force)
        finally:
            self._writer.close()

    @property
    def _facts(self) -> RunnerFacts:
        facts: RunnerFacts = self._controller.facts[0]
        return facts

    # ------------------------------------------------------------------------------------------------ checks

    def _check_batch_size(self) -> None:
        if BATCH_SIZE not in self._requested_config:
            return
        split = split_batch_size(self._requested_config[BATCH_SIZE], self.max_replicas)
        if split.effective != split.requested:
            logger.warning(
                "the batch size %s does not divide over %s workers: taking %s",
                split.requested,
                self.max_replicas,
                split.effective,
            )


def _first(state: dict[str, Any], *kept_alive: Any) -> dict[str, Any]:
    return state


def _end_of(answer: EpochAnswer, info: Mapping[str, Any]) -> Progress:
    loss = results.as_number(answer.metrics.values.get("last_train_loss")) if answer.metrics is not None else None
    return Progress(answer.num_steps, answer.num_steps, answer.epoch_idx, info.get("num_epochs"), loss)


def _check_parts(state: Mapping[str, Any], facts: RunnerFacts) -> None:
    """What the driver can know: whether a state has all its parts, in the right numbers."""
    expected = {"models": facts.num_models, "optimizers": facts.num_optimizers}
    if facts.num_schedulers is not None or state.get("schedulers"):
        expected["schedulers"] = facts.num_schedulers or 0
    missing = [key for key in ("epoch", "operator", *expected) if key not in state]
    if missing:
        raise KeyError(f"The state has no {', '.join(repr(key) for key in missing)}; it has {sorted(map(str, state))}.")
    for key, count in expected.items():
        if len(state[key]) != count:
            raise ValueError(
                f"The state holds {len(state[key])} {key}, but the operator registered {count}. Nothing was "
                "loaded; load it with "
                "the operator that saved it."
            )
