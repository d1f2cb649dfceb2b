"""Digests of frozen parameters, and what notices that they have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raysgd.torch.objects.remade import RemadeParameters, digest_of
from raysgd.torch.parallel.undo import lacks_memory

SHAPES = [(), (1,), (7,), (3, 5), (64, 64), (1000, 33), (0,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.complex64]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50
    return made.to(dtype) if dtype != torch.uint8 else made.abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_digest_is_that_of_the_numbers_wherever_they_lie(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = numbers(shape, dtype)
    digest = digest_of(tensor)
    assert digest == digest_of(tensor.clone()) == digest_of(torch.nn.Parameter(tensor, requires_grad=False))
    room = torch.zeros(tensor.numel() + 1, dtype=dtype)[1:]  # at an odd place in memory
    room.copy_(tensor.reshape(-1))
    assert digest_of(room.reshape(shape)) == digest
    if tensor.ndim == 2:
        assert digest_of(tensor.T.contiguous().T) == digest, "strides are no numbers"
    if tensor.numel():
        other = tensor.clone()
        other.view(-1)[-1] += 1
        assert digest_of(other) != digest


def test_a_digest_says_dtype_and_shape() -> None:
    kinds = [digest_of(torch.zeros(2, 3)), digest_of(torch.zeros(6)), digest_of(torch.zeros(6, dtype=torch.int32))]
    assert [kind.rpartition(" ")[0] for kind in kinds] == ["float32 2x3", "float32 6", "int32 6"]
    assert len(set(kinds)) == 3


def test_rows_in_another_order_are_other_numbers() -> None:
    tensor = numbers((100, 2048), torch.float32)
    assert digest_of(tensor.flip(0)) != digest_of(tensor)


class Net(torch.nn.Module):
    """A frozen body whose weight has two names, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tied, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.tied.weight = self.body.weight
        self.body.requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))


class Some:
    """Has the name that errors tell."""


def remade(net: torch.nn.Module) -> RemadeParameters:
    return RemadeParameters([net], Some, num_models=1)


def test_all_names_of_what_is_frozen_are_left_out_and_buffers_stay() -> None:
    net = Net()
    state = remade(net).without(0, net.state_dict())
    assert list(state) == ["count", "tied.bias", "head.weight", "head.bias"]
    assert state._metadata == net.state_dict()._metadata
    parts = remade(net).record()["parts"]
    assert [*parts[0]] == ["body.weight", "body.bias", "tied.weight"]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "in place": lambda net: net.body.weight.detach().mul_(1.5),
    "through data": lambda net: net.body.weight.data.mul_(1.5),
    "by new data": lambda net: setattr(net.body.weight, "data", net.body.weight.data * 1.5),
    "one number": lambda net: net.body.bias.detach()[2].add_(1),
    "loaded": lambda net: net.load_state_dict(Net().state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_refused_by_its_name(change: str) -> None:
    net = Net()
    found = remade(net)
    found.check_unchanged()
    CHANGES[change](net)
    for _ in range(2):
        name = "body.bias" if change == "one number" else "body.weight"
        with pytest.raises(ValueError, match=rf"`{name}` of model 0 \(`Net`\) has changed since `setup`"):
            found.record()


def test_a_change_is_found_beside_another_parameter_that_was_written_again() -> None:
    net = Net()
    found = remade(net)
    net.body.bias.detach().add_(0)
    net.body.weight.data.fill_(7.0)
    with pytest.raises(ValueError, match=r"`body.weight` of model 0 .* has changed"):
        found.record()


def test_a_criterion_is_named_as_such() -> None:
    criterion = torch.nn.Linear(2, 2).requires_grad_(False)
    found = RemadeParameters([Net(), criterion], Some, num_models=1)
    criterion.weight.data.fill_(7.0)
    with pytest.raises(ValueError, match=r"`weight` of the criterion \(`Linear`\) has changed"):
        found.record()


def test_the_same_numbers_written_again_are_no_change() -> None:
    net = Net()
    found = remade(net)
    net.load_state_dict(net.state_dict())
    net.body.weight.data = net.body.weight.data.clone()
    found.check_unchanged()
    net.body.weight.data.mul_(2)
    with pytest.raises(ValueError, match="has changed"):
        found.check_unchanged()


def test_a_parameter_that_does_not_lie_in_one_piece_is_watched_too() -> None:
    net = Net()
    net.body.weight.data = torch.randn(4, 4).T
    found = remade(net)
    found.check_unchanged()
    net.body.weight.data.mul_(2)
    with pytest.raises(ValueError, match="has changed"):
        found.check_unchanged()


def test_what_is_trained_later_stays_in_the_state() -> None:
    net = Net()
    found = remade(net)
    net.body.bias.requires_grad_(True)
    found.follow_trained()
    net.body.bias.detach().add_(1)
    found.check_unchanged()
    assert "body.bias" in found.without(0, net.state_dict())
    assert "body.bias" not in found.record()["parts"][0]
    net.body.bias.requires_grad_(False)
    found.follow_trained()
    assert "body.bias" in found.without(0, net.state_dict()), "it is not what `setup` made"
    assert found.ids == {id(net.body.weight)}


def test_what_was_left_out_earlier_gets_its_first_numbers_back() -> None:
    net = Net()
    found = remade(net)
    state = {"models": [found.without(0, net.state_dict())], "remade": found.record()}
    first = net.body.bias.clone()
    net.body.bias.requires_grad_(True)
    found.follow_trained()
    net.body.bias.detach().add_(1)
    net.body.bias.requires_grad_(False)
    _, left_out = found.fitting(0, state["models"][0], state["remade"])
    found.begin_loading(0, left_out)
    found.end_loading(0, left_out)
    assert torch.equal(net.body.bias, first)
    assert "body.bias" in found.record()["parts"][0]


def ranks(*nets: torch.nn.Module) -> list[Any]:
    """Let ranks compare what they have, and return what each one raised."""
    asked: list[list[Any]] = []

    class Asked(Exception):
        pass

    answers: list[list[float]] = []
    while True:
        errors: list[Any] = []
        asked.clear()
        for net in nets:
            replies = iter(answers)

            def sums(*own: float, replies: Any = replies) -> list[float]:
                reply = next(replies, None)
                if reply is None:
                    asked.append([*own])
                    raise Asked
                return reply  # type: ignore[no-any-return]

            try:
                remade(net).check_ranks(sums)
                errors.append(None)
            except (ValueError, Asked) as error:
                errors.append(error)
        if not asked:
            return errors
        answers.append([sum(each) for each in zip(*asked, strict=True)])


def test_ranks_that_made_the_same_agree() -> None:
    net = Net()
    other = Net()
    other.load_state_dict(net.state_dict())
    torch.nn.init.zeros_(other.head.weight)  # trained, so it may differ
    assert ranks(net, other, net) == [None] * 3


def test_ranks_that_made_something_else_name_it() -> None:
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        other.body.bias[1] += 1
    for error in ranks(net, net, other):
        assert "`body.bias` of model 0 (`Net`) is not the same on all workers" in str(error)
    other.body.bias.requires_grad_(True)
    assert all("freezes" in str(error) for error in ranks(net, other))


def test_what_does_not_change_takes_no_memory_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Linear(100, 100).requires_grad_(False)
    monkeypatch.setattr("raysgd.torch.parallel.undo._free_bytes", lambda *place: 1000)
    assert lacks_memory([net], 1) is not None
    assert lacks_memory([net], 1, RemadeParameters([net], Some, num_models=1).ids) is None
