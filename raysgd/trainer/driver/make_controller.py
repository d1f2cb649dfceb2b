"""Creates the controller of a trainer: the object that starts, replaces and ends the trainer's workers."""

from __future__ import annotations

from dataclasses import replace

from raysgd.core.cluster.ray_cluster import draining_nodes
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.lifecycle import ElasticRules
from raysgd.core.engine.policies import FailurePolicy, ScalingPolicy
from raysgd.core.engine.shared.connection import Connection
from raysgd.core.engine.shared.group_spec import FrontEndWords, GroupSpec
from raysgd.trainer.configuration.settings import GroupSettings, ReplicaMaker

WORDS = FrontEndWords(
    when_shut_down="Create a new one; `save` before `shutdown` keeps the state.",
    when_interrupted="State that you had not saved is lost.",
    when_starved="The last completed state is kept: it can be saved, and the next call looks for resources again.",
    when_spent=(
        "The last completed state is kept: call again to continue with new workers, or use `shutdown(force=True)`."
    ),
    when_not_granted=(
        "Ask for fewer workers or less per worker, free what is held, add nodes, or wait longer by setting the "
        "environment variable SGD_PLACEMENT_GROUP_TIMEOUT_S."
    ),
    after_end="the last completed state is kept",
    restart_point="from the last completed call",
)
"""Words for the engine's messages to users of `TorchTrainer` and `TFTrainer`. Other trainers use the same engine."""


def make_controller(
    settings: GroupSettings,
    make_replica: ReplicaMaker,
    connection: Connection,
    reservation_timeout_s: float,
    *,
    keeps_survivors: bool,
    renews_survivors: bool,
) -> ElasticController:
    """Return the controller for a trainer's settings.

    Args:
        settings: Number of workers, their resources and how to handle failures.
        make_replica: Creates the replica of a worker, the object that holds the worker's training operator.
        connection: Connects each worker with the other workers of its group.
        reservation_timeout_s: Seconds to wait until Ray has reserved the workers' resources.
        keeps_survivors: Whether workers that survive a failure can continue from their current training state.
        renews_survivors: Whether workers that survive a failure, but cannot continue, can load a snapshot in the same
            process.
    """
    is_wanted = settings.recovery.in_place and not settings.is_driver_only
    continues = is_wanted and keeps_survivors
    recovery = settings.recovery
    every_s, operator_cls = recovery.snapshot_every_s, make_replica.settings.training_operator_cls
    if settings.use_local and every_s == "auto":
        # Take a snapshot after each call. The user may change the operator in the driver between two calls, and the
        # trainer cannot notice this.
        every_s = 0.0
    num_gpus = settings.num_gpus_per_worker if make_replica.settings.use_gpu else 0
    group = GroupSpec(
        connection=connection,
        make_replica=make_replica,
        resources=settings.placement.resources(settings.num_cpus_per_worker, num_gpus),
        packs=settings.placement.packs(by_default=num_gpus > 0),
        use_local=settings.use_local,
        initialization_hook=settings.initialization_hook,
        reservation_timeout_s=reservation_timeout_s,
        captures=not settings.is_driver_only,
        snapshot_every_s=every_s,
        snapshots_inside=recovery.snapshot_every_n_steps is not None,
        regroups=continues,
        renews=is_wanted and renews_survivors,
        num_spares=settings.spare_workers,
        heartbeat_s=recovery.heartbeat_s,
        settle_timeout_s=recovery.settle_timeout_s,
        words=replace(WORDS, name=f"the trainer of `{operator_cls.__name__}`"),
    )
    scaling = ScalingPolicy(
        max_workers=settings.num_workers, min_workers=settings.min_workers, num_local=int(settings.use_local)
    )

    def keeps_global_batch() -> bool:
        facts = controller.facts[0]
        return facts.keeps_global_batch and facts.epoch_obstacle is None

    controller = ElasticController(
        group,
        scaling,
        FailurePolicy(continues),
        rules=ElasticRules(recovery.wait_for_workers, recovery.resize_interval_s, draining_nodes, keeps_global_batch),
    )
    return controller
