"""What keeps the workers of a class-based trainer alive is made as its arguments say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest

from raysgd.core.engine.shared.interface import GroupSpec, NoConnection
from raysgd.trainer.configuration import GroupSettings, Placement, Recovery, ReplicaMaker
from raysgd.trainer.driver import life
from raysgd.trainer.messages.epochs import RunnerFacts


def made_by(use_gpu: bool, **options: Any) -> Any:
    """The arguments of the controller, and what stands for the controller itself."""
    settings = GroupSettings(num_workers=2, backend="gloo", timeout_s=60.0, **options)
    make_replica = ReplicaMaker(
        None, SimpleNamespace(use_gpu=use_gpu, recovery=Recovery(), training_operator_cls=object)
    )
    framework = SimpleNamespace(
        connection=NoConnection(), reservation_timeout_s=10.0, keeps_survivors=True, renews_survivors=True
    )
    with patch.object(life, "ElasticController") as made:
        life.make_controller(settings, make_replica, framework)  # type: ignore[arg-type]
    return made


def spec_of(use_gpu: bool, **options: Any) -> GroupSpec:
    spec: GroupSpec = made_by(use_gpu, **options).call_args.args[0]
    return spec


@pytest.mark.parametrize(
    ("use_gpu", "strategy", "packs"),
    [(True, None, True), (False, None, False), (True, "SPREAD", False), (False, "PACK", True)],
)
def test_workers_with_gpus_are_packed_and_others_spread_unless_you_say_otherwise(
    use_gpu: bool, strategy: Literal["PACK", "SPREAD"] | None, packs: bool
) -> None:
    assert spec_of(use_gpu, placement=Placement(placement_strategy=strategy)).packs is packs


def test_workers_get_what_the_placement_says() -> None:
    placement = Placement({"fast_disk": 1}, "A100", runtime_env={"env_vars": {"A": "1"}})
    resources = spec_of(True, placement=placement, num_gpus_per_worker=0.5).resources
    assert resources.bundle() == {"CPU": 1, "GPU": 0.5, "fast_disk": 1, "accelerator_type:A100": 0.001}
    assert resources.runtime_env == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"keeps_global_batch": True}, True),
        ({"keeps_global_batch": False}, False),
        ({"keeps_global_batch": True, "epoch_obstacle": "`Own` overrides `train_epoch`"}, False),
    ],
)
def test_what_follows_a_loss_goes_by_what_the_replicas_say_of_their_steps(
    facts: dict[str, Any], expected: bool
) -> None:
    made = made_by(False)
    rest = dict.fromkeys(("num_models", "num_optimizers", "seed"), 1)
    told = RunnerFacts(**rest, train_data=None, validation_data=None, keeps_own_state=False, **facts)
    made.return_value.facts = [told, told]
    rules = made.call_args.kwargs["rules"]
    assert (rules.wait, rules.resize_interval_s, rules.keeps_global_batch()) == ("auto", 60.0, expected)
