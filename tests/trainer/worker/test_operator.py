"""What operators of all frameworks share, without a framework."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import pytest

from raysgd.core.engine.shared.types import World
from raysgd.exceptions import NotRegisteredError
from raysgd.trainer.worker.operator import (
    BaseOperator,
    Internals,
    ReadOnlyView,
    RegisteredParts,
    is_stock,
    required,
)


@dataclass(frozen=True)
class Settings:
    use_gpu: bool = False


@dataclass(frozen=True)
class Context:
    settings: Settings
    world: World


class Empty(BaseOperator):
    _use_gpu = ReadOnlyView("use_gpu", "Ask the trainer.")

    def setup(self, config: dict[str, Any]) -> None:
        self.heard = config


def make(operator_cls: type[BaseOperator] = Empty, world: World = World(rank=1, size=3)) -> Any:  # noqa: B008
    config = {"a": 1}
    return operator_cls(config, Internals(config, Context(Settings(), world)))


def test_setup_hears_the_config_and_can_read_its_place() -> None:
    class Reads(Empty):
        def setup(self, config: dict[str, Any]) -> None:
            self.place = (self.world_rank, self.local_rank, self.world_size, self.use_gpu, self.global_step)

    assert make().heard is make().config or make().heard == {"a": 1}
    assert make(Reads).place == (1, 0, 3, False, 0)


def test_without_a_setup_there_is_nothing_to_train() -> None:
    with pytest.raises(NotImplementedError, match="Override `setup`"):
        make(BaseOperator)


def test_a_view_shows_what_the_library_keeps() -> None:
    operator = make()
    assert (operator._use_gpu, operator._config) == (False, {"a": 1})
    assert isinstance(Empty._use_gpu, ReadOnlyView), "the class has the view itself"


def test_an_assignment_to_a_view_is_refused_with_a_way_out() -> None:
    operator = make()
    with pytest.raises(AttributeError, match=r"`self._use_gpu` belongs to .* Ask the trainer\. .*`self.my_use_gpu`"):
        operator._use_gpu = True
    assert operator._use_gpu is False


def test_attributes_of_the_user_never_reach_the_internals() -> None:
    operator = make()
    operator._latest_metrics = operator._meters_to_fill = operator._context = "mine"
    assert operator._raysgd.latest_metrics == {}
    assert operator._raysgd.take_meters().num_batches == 0


def test_an_operator_goes_on_at_another_place() -> None:
    operator = make()
    operator._raysgd.take_rank(operator, World(rank=0, size=2, local_rank=1))
    assert (operator.world_rank, operator.local_rank, operator.world_size) == (0, 1, 2)


def test_what_the_stock_methods_need_is_named() -> None:
    operator = make()
    with pytest.raises(NotRegisteredError, match=r"`Empty` has no `self.model`.*`setup` is defined at "):
        required(operator, "model")
    operator.model = 3
    assert required(operator, "model") == 3


def test_metrics_are_parted_from_their_weight() -> None:
    internals = make()._raysgd
    assert internals.values_and_weight({"loss": 1, "num_samples": 4}, "train_batch") == ({"loss": 1}, 4)
    assert internals.values_and_weight({"loss": 2}, "train_batch") == ({"loss": 2}, 1)
    assert internals.latest_metrics == {"loss": 2}


def test_an_epoch_that_is_gone_on_with_is_counted_in_its_own_meters() -> None:
    internals = make()._raysgd
    begun = internals.new_meters()
    begun.update({"loss": 1}, n=2)
    internals.meters_to_fill = begun
    assert internals.take_meters() is begun
    assert internals.take_meters() is not begun


@pytest.mark.parametrize(("container", "mirrored"), [(None, 3), (list, [3]), (tuple, (3,))])
def test_what_is_made_of_the_parts_comes_back_in_their_container(container: type | None, mirrored: object) -> None:
    assert RegisteredParts([1], container).mirror([3]) == mirrored


class Own(Empty):
    @functools.wraps(BaseOperator.world_changed)
    def world_changed(self) -> None:
        """Look like the library's method."""


class Library(Empty):
    """A ready-made operator of the library."""

    def world_changed(self) -> None:
        pass


Library.__module__ = "raysgd.operators"


def test_a_method_is_the_users_whatever_it_is_called_and_wherever_it_is_set() -> None:
    plain, own, ready_made, patched = make(Empty), make(Own), make(Library), make(Empty)
    assert (is_stock(plain, "world_changed"), is_stock(own, "world_changed")) == (True, False)
    assert is_stock(ready_made, "world_changed")
    assert not is_stock(ready_made, "world_changed", of=BaseOperator)
    assert is_stock(plain, "world_changed", "log", of=BaseOperator)
    patched.world_changed = types.MethodType(Own.world_changed, patched)
    assert not is_stock(patched, "log", "world_changed")
    patched.world_changed = lambda: None
    assert not is_stock(patched, "world_changed")
