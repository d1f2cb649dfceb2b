"""Omits frozen parameters, which `setup` recreates, from snapshots and checkpoints. Stores their digests instead.

A digest is a hash of the parameter's values, with its dtype and shape. This module is imported only if an operator sets
`excludes_frozen_from_state = True`. Saved states then omit the parameters that are frozen at the end of `setup`. If
user code unfreezes such a parameter and calls `rewrap`, states contain the parameter from then on, even if it is frozen
again. If a parameter changes while it is frozen, saving a state raises an error that names the parameter. See ADR 150.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from raysgd.core.private_names import require_names
from raysgd.torch.objects.loading import plain
from raysgd.trainer.worker.replica_state import require

Digests = Mapping[str, str]
"""Digests of a module's omitted parameters, by name."""

_ROW_WORDS = 512
_NUM_SAMPLES = 64  # maximum number of values per parameter that each check compares
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes
_PIECE_BITS, _NUM_PIECES = 8, 8  # ranks compare a hash in 8-bit pieces, so that sums of squares are exact floats


class _Parameter:
    """A parameter that is frozen at the end of `setup`. Its values at that time are called its original values.

    Attributes:
        parameter: The parameter.
        digest: Digest of the original values. Saved states contain the digest instead of the parameter.
        original: Copy of the original values, made before training or loading changes the parameter; None if there is
            no copy.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter, self.digest = parameter, digest_of(parameter)
        self.original: torch.Tensor | None = None
        self.note()

    def note(self) -> None:
        """Record that the parameter currently has its original values. Used to detect later changes quickly."""
        self._mark, self._few = self._mark_now(), _few_of(self.parameter)

    @property
    def sampled(self) -> torch.Tensor:
        """A few of the parameter's current values, with their bits read as integers."""
        return self._few if self.parameter.is_contiguous() else _few_of(self.parameter)

    def _mark_now(self) -> tuple[int, int]:
        return self.parameter._version, self.parameter.data_ptr()

    @property
    def may_have_changed(self) -> bool:
        """True if the parameter was written to, or is in other memory now. Its values may still be the same."""
        return self._mark_now() != self._mark

    def has_changed(self) -> bool:
        """Return True if the parameter's values differ from its original values. All values are compared."""
        if digest_of(self.parameter) != self.digest:
            return True
        self.note()
        return False

    @torch.no_grad()
    def keep_original(self) -> None:
        """Copy the original values to host memory, before the parameter changes.

        Do nothing if there is already a copy, or if the parameter no longer has its original values.
        """
        if self.original is None and digest_of(self.parameter) == self.digest:
            self.original = self.parameter.detach().cpu().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Set the parameter to its original values, if there is a copy of them."""
        if self.original is not None:
            self.parameter.copy_(self.original)
            self.note()


class RemadeParameters:
    """The frozen parameters that the saved states of one operator omit.

    Args:
        parts: Modules whose states are saved: the models, then the criterion if it has trainable parameters.
        operator_cls: Class of the operator. Its `setup` creates the parameters.
        num_models: Number of models among `parts`.

    Attributes:
        ids: `id()` of each parameter that saved states currently omit.
    """

    def __init__(self, parts: Sequence[torch.nn.Module], operator_cls: type, num_models: int) -> None:
        require_names(torch.Tensor, "_version")
        self._num_models = num_models
        self._by, self._module_names = operator_cls.__name__, [type(part).__name__ for part in parts]
        self._by_whole_name = f"{operator_cls.__module__}.{operator_cls.__qualname__}"
        known: dict[int, _Parameter] = {}  # by ID, because a tied parameter has several names
        self._made: list[dict[str, _Parameter]] = [{} for _ in parts]
        for part, made in zip(parts, self._made, strict=True):
            for name, each in part.named_parameters(remove_duplicate=False):
                if not each.requires_grad and _has_numbers(each):
                    made[plain(name)] = known.get(id(each)) or known.setdefault(id(each), _Parameter(each))
        self._left_out = [set(made) for made in self._made]
        self.ids: set[int] = set()
        self._update()

    def _update(self) -> None:
        left_out = {id(each.parameter): each for part in self._parts_left_out for each in part.values()}
        self.ids.clear()
        self.ids.update(left_out)
        self._watched = [*left_out.values()]
        self._samples = _joined(each.sampled for each in self._watched)

    @property
    def _parts_left_out(self) -> list[dict[str, _Parameter]]:
        """The parameters that the state omits: for each module, by name."""
        pairs = zip(self._made, self._left_out, strict=True)
        return [{name: each for name, each in made.items() if name in names} for made, names in pairs]

    def _named(self, index: int, name: str) -> str:
        is_criterion = index >= self._num_models
        return f"`{name}` of {'the criterion' if is_criterion else f'model {index}'} (`{self._module_names[index]}`)"

    # -------------------------------------------------------------------------------------------------------- saving

    def without(self, index: int, state: Any) -> Any:
        """Return the state dict of a module without the parameters that saved states omit.

        Args:
            index: Index of the module.
            state: State dict of the module.
        """
        left_out = self._left_out[index]
        return _reduced(state, left_out) if left_out else state

    def record(self) -> dict[str, Any]:
        """Return what saved states contain instead of the omitted parameters: the operator's name and all digests.

        Raises:
            ValueError: A parameter has changed since `setup`.
        """
        self.check_unchanged()
        parts = [{name: each.digest for name, each in part.items()} for part in self._parts_left_out]
        return {"by": self._by_whole_name, "parts": parts}

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Return a dict of the omitted parameters, by name, for each module. `completed` adds them to a state dict."""
        return [{name: each.parameter.detach() for name, each in part.items()} for part in self._parts_left_out]

    def check_unchanged(self) -> None:
        """Check that no omitted parameter has changed since `setup`.

        First, the version and the memory address of each parameter are compared. If any of these has changed, all
        values of the affected parameters are compared. PyTorch increments the version with each write, except for
        writes through `.data`. Therefore, if no version or address has changed, a few values of each parameter are
        compared. If one of these has changed, all values of all parameters are compared.

        Raises:
            ValueError: A parameter no longer has the values that `setup` gave it.
        """
        samples = _joined(each.sampled for each in self._watched)
        are_as_sampled = _are_equal(self._samples, samples)
        suspects = [each for each in self._watched if each.may_have_changed or not are_as_sampled]
        if not suspects:
            return
        changed = {id(each) for each in suspects if each.has_changed()}
        if not changed:
            self._samples = samples
        for index, part in enumerate(self._parts_left_out):
            for name, each in part.items():
                if id(each) in changed:
                    raise ValueError(
                        f"{self._named(index, name)} has changed since `setup` although it is frozen. With "
                        f"`excludes_frozen_from_state = True` in `{self._by}`, no checkpoint and no new worker would "
                        "have its new values. Remove `excludes_frozen_from_state`, or keep tensors that change without "
                        "gradients, such as a momentum encoder, in buffers, or call `self.rewrap()` after you unfreeze "
                        "parameters."
                    )

    def follow_trained(self) -> None:
        """Let saved states contain parameters that have become trainable. First copy their original values."""
        for made, names in zip(self._made, self._left_out, strict=True):
            for name in [name for name in names if made[name].parameter.requires_grad]:
                made[name].keep_original()
                names.discard(name)
        self._update()

    def added_to(
        self, left_out_of: Callable[[torch.nn.Module], Collection[str] | None]
    ) -> Callable[[torch.nn.Module], Collection[str] | None]:
        """Extend `left_out_of`, which selects parameters that the ranks do not compare.

        Args:
            left_out_of: Function that gets a model and returns the names of the parameters that the ranks do not
                compare. It returns None for a model if the ranks compare none of its parameters.

        Returns:
            A function like `left_out_of`. The names that it returns include the parameters that saved states omit.
        """

        def more_left_out_of(model: torch.nn.Module) -> Collection[str] | None:
            names = left_out_of(model)
            own = (name for name, each in model.named_parameters() if id(each) in self.ids)
            return None if names is None else {*names, *own}

        return more_left_out_of

    # ------------------------------------------------------------------------------------------------------- loading

    def fitting(self, index: int, saved: Any, record: Any) -> tuple[Any, Collection[str]]:
        """Check that `setup` has created the parameters that a saved state omits, with the same values.

        Args:
            index: Index of the module.
            saved: Saved state of the module. Its names have no prefixes of `torch.compile`.
            record: Digests in the saved state (see the method `record`); None if the state omits no parameters.

        Returns:
            The state to load, and the names of the parameters that it omits. It also omits parameters that the saved
            state contains but `setup` has already created with the same values.

        Raises:
            ValueError: A parameter that the saved state omits is not frozen in this operator's `setup`. Or it was
                trained, and there is no copy of its original values. Or a frozen parameter has other values than in
                the saved run.
        """
        if not isinstance(saved, Mapping):
            return saved, ()  # the caller rejects a state that is not a dict
        made, found = self._made[index], _digests_in(record, index)
        theirs = found or {}
        missing = {name for name in theirs if name not in saved}
        for name in (name for name in theirs if name in missing):
            if name not in made:
                raise ValueError(
                    f"The state does not match, so nothing was loaded. It omits {self._named(index, name)}, because "
                    f"this parameter was frozen when the state was saved, but `{self._by}.setup` does not freeze or "
                    f"does not create it. Freeze the same parameters in `setup` as `{_maker_in(record)}.setup` does, "
                    "or save with `save(path, frozen=True)`."
                )
            self._check_alike(index, name, theirs[name], made[name].digest)
            if made[name].parameter.requires_grad and made[name].original is None:
                raise ValueError(
                    f"The state does not match, so nothing was loaded. It omits {self._named(index, name)}, which this "
                    "trainer has trained, so its original values are gone. Load the state into a new trainer."
                )
        repeated = {name for name in made if name in saved and (found is None or name in theirs)}
        repeated &= self._left_out[index]
        for name in (name for name in made if name in repeated):
            if isinstance(saved[name], torch.Tensor):
                self._check_alike(index, name, digest_of(saved[name]), made[name].digest)
        return _reduced(saved, repeated), missing | repeated

    def _check_alike(self, index: int, name: str, theirs: Any, own: str) -> None:
        if theirs == own:
            return
        (their_kind, _, _), (own_kind, _, _) = str(theirs).rpartition(" "), own.rpartition(" ")
        if their_kind != own_kind:
            finding = f"is {their_kind} in the state and {own_kind} in this trainer"
        else:
            finding = "has other values in the state than in this trainer"
        raise ValueError(
            f"The state does not match, so nothing was loaded. {self._named(index, name)} is frozen and created by "
            f"`{self._by}.setup` (`excludes_frozen_from_state`), but it {finding}. Let `setup` create it from the same "
            "files, with the same dtype, on every worker and in every run."
        )

    def begin_loading(self, index: int, left_out: Collection[str]) -> None:
        """Before a state is loaded, copy the original values of parameters that loading will overwrite.

        Only parameters that saved states have omitted so far are copied.

        Args:
            index: Index of the module whose state will be loaded.
            left_out: Names of the parameters that the loaded state omits, so that loading does not overwrite them.
        """
        for name in self._left_out[index] - {*left_out}:
            self._made[index][name].keep_original()

    def end_loading(self, index: int, left_out: Collection[str]) -> None:
        """Restore the original values of parameters that a loaded state omits.

        States that are saved later also omit these parameters, unless they are trainable.

        Args:
            index: Index of the module whose state was loaded.
            left_out: Names of the parameters that the loaded state omits.
        """
        made = self._made[index]
        for name in {*left_out} - self._left_out[index]:
            made[name].restore()
        self._left_out[index] = {name for name in left_out if not made[name].parameter.requires_grad}
        self._update()

    # ------------------------------------------------------------------------------------------------ comparing ranks

    def check_ranks(self, sum_over_ranks: Callable[..., list[float]]) -> None:
        """Check that all ranks have created the same frozen parameters. All ranks must call this method together.

        Args:
            sum_over_ranks: Function that sums each of its arguments over the ranks, and returns the sums.

        Raises:
            ValueError: The ranks' frozen parameters differ. Raised on all ranks.
        """
        named = [(index, name) for index, made in enumerate(self._made) for name in made]
        digests = [f"{name} {self._made[index][name].digest}" for index, name in named]
        count = len(digests)
        num_ranks, total, squares, *sums = sum_over_ranks(1, count, count * count, *_pieces("\n".join(digests)))
        if num_ranks * squares != total * total:
            raise ValueError(
                f"`{self._by}.setup` freezes {count} parameters on this worker, but another number of them on other "
                "workers. With `excludes_frozen_from_state = True`, `setup` must create the same model on every worker."
            )
        if _are_alike(num_ranks, sums):
            return
        per_parameter = sum_over_ranks(*(piece for each in digests for piece in _pieces(each)))
        size = 2 * _NUM_PIECES
        for place, (index, name) in enumerate(named):
            if not _are_alike(num_ranks, per_parameter[place * size : (place + 1) * size]):
                raise ValueError(
                    f"{self._named(index, name)} is not the same on all workers. With "
                    f"`excludes_frozen_from_state = True`, `{self._by}.setup` must create the same frozen parameters "
                    "on every worker: load them from a file, or pass `TorchTrainer(seed=...)`."
                )


def refuse_left_out(record: Any, operator_cls: type) -> None:
    """Raise if a saved state omits frozen parameters. Called for operators without `excludes_frozen_from_state`.

    Args:
        record: Digests in the saved state.
        operator_cls: Class of the operator, for the message.

    Raises:
        ValueError: The state omits parameters.
    """
    for index in range(len(parts_of(record))):
        for name in _digests_in(record, index) or ():
            raise ValueError(
                f"The state does not match, so nothing was loaded. It omits frozen parameters that "
                f"`{_maker_in(record)}.setup` creates again, such as `{name}`. Write "
                f"`excludes_frozen_from_state = True` in `{operator_cls.__name__}`, whose `setup` must create "
                "them too, or save with `save(path, frozen=True)`."
            )


def completed(state: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state dict of a module with the omitted parameters added.

    Args:
        state: State dict without the omitted parameters.
        tensors: Omitted parameters by name.
    """
    return _like(state, {**state, **tensors})


def _reduced(state: Any, names: Collection[str]) -> Any:
    """Return the state dict of a module without the entries in `names`."""
    return _like(state, {name: value for name, value in state.items() if plain(name) not in names})


def _like(state: Any, content: Mapping[str, Any]) -> Any:
    """Return a state dict with the entries in `content`, and with the attributes of `state`, such as `_metadata`."""
    made: Any = OrderedDict(content)
    vars(made).update(getattr(state, "__dict__", {}))
    return made


def _maker_in(record: Any) -> str:
    return str(record.get("by"))[:200] if isinstance(record, Mapping) else "?"


def parts_of(record: Any) -> Sequence[Any]:
    """Return the digests in a saved state: a dict of strings for each module, or None for a module without a record.

    Args:
        record: Record of the omitted parameters in the saved state, which `RemadeParameters.record` returned.

    Raises:
        ValueError: The record is malformed.
    """
    parts = record.get("parts") if isinstance(record, Mapping) else None
    is_list = isinstance(parts, list | tuple) and all(each is None or isinstance(each, Mapping) for each in parts)
    require(is_list, "its `remade` does not say what is left out")
    assert isinstance(parts, list | tuple)
    texts = (each for part in parts for pair in (part or {}).items() for each in pair)
    require(all(isinstance(each, str) for each in texts), "its `remade` does not say what is left out")
    return parts


def _digests_in(record: Any, index: int) -> Digests | None:
    """Return the digests of the parameters that the saved state of a module omits.

    Return None if the saved state has no record of this module, for example because the operator that saved the state
    did not set `excludes_frozen_from_state`.
    """
    parts = () if record is None else parts_of(record)
    digests = parts[index] if index < len(parts) else None
    found: Digests | None = digests
    return found


def with_record_of(state: dict[str, Any], saved: Mapping[str, Any], key: str, part: str) -> dict[str, Any]:
    """Return a state with updated digests, after the states of some modules in it were replaced with saved states.

    Args:
        state: State in which modules' states were replaced.
        saved: Saved state from which these modules' states were taken.
        key: Key of the digests in both states.
        part: Which modules were replaced: "models" or "criterion".
    """
    records = [each.get(key) for each in (state, saved)]
    num_models = len(state["models"])
    own, theirs = ([None] * (num_models + 1) if each is None else [*parts_of(each), None] for each in records)
    mine, others = own[: num_models + 1], theirs[: num_models + 1]
    parts = [*others[:-1], mine[-1]] if part == "models" else [*mine[:-1], others[-1]]
    by = next((each["by"] for each in records[::-1] if each is not None and "by" in each), None)
    return {**state, key: {"by": by, "parts": parts}}


# ---------------------------------------------------------------------------------------------------------- digests


def _has_numbers(parameter: torch.Tensor) -> bool:
    if is_lazy(parameter) or parameter.is_meta or parameter.layout != torch.strided:
        return False
    return not (parameter.is_quantized or parameter.is_nested)


@torch.no_grad()
def digest_of(tensor: torch.Tensor) -> str:
    """Return a string with the dtype, shape and hash of a tensor. The string does not depend on the tensor's device.

    To save time, the tensor's device first sums rows of 512 eight-byte words. Only the sums, and the bytes after the
    last full row, are hashed. The hash does not depend on the order of the words in a row. It detects nearly all other
    accidental differences, but an attacker could construct weights that have a given hash.

    Examples:
        >>> digest_of(torch.ones(2, 3))
        'float32 2x3 2d1a3c579a15eedd'
    """
    import xxhash

    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
    content = values.contiguous().reshape(-1).view(torch.uint8)
    if content.storage_offset() % 8 or content.data_ptr() % 8:
        content = content.clone()
    num_in_rows = content.numel() // (8 * _ROW_WORDS) * (8 * _ROW_WORDS)
    checksum = xxhash.xxh3_64()
    if num_in_rows:
        rows = content[:num_in_rows].view(torch.int64).view(-1, _ROW_WORDS).sum(-1)
        checksum.update(rows.cpu().numpy().data)
    checksum.update(content[num_in_rows:].cpu().numpy().data)
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {checksum.hexdigest()}"


def _few_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a few of a parameter's values, with their bits read as integers.

    If the parameter is contiguous, the result is a view of its memory.
    """
    values = parameter.detach()
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    few = flat[:: max(1, -(-flat.numel() // _NUM_SAMPLES))]
    return few.view(_BITS[few.element_size()])


def _joined(samples: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate sampled values of several parameters. Return a new tensor for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in samples:
        by_device.setdefault(each.device, []).append(each)
    return [torch.cat(each) for each in by_device.values()]


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    if len(some) != len(others):
        return False
    return all(a.device == b.device and torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _pieces(text: str) -> list[int]:
    """Return the hash of a string in 8-bit pieces, each followed by its square.

    The ranks sum these numbers, and `_are_alike` decides from the sums whether all ranks have the same pieces.
    """
    import xxhash

    digest = xxhash.xxh3_64_intdigest(text.encode())
    pieces = [digest >> _PIECE_BITS * place & (1 << _PIECE_BITS) - 1 for place in range(_NUM_PIECES)]
    return [number for piece in pieces for number in (piece, piece * piece)]


def _are_alike(num_ranks: float, sums: Sequence[float]) -> bool:
    """Return True if all ranks have the same values.

    A value is the same on all ranks if and only if the mean of its squares equals the square of its mean.

    Args:
        num_ranks: Number of ranks.
        sums: For each value: its sum over the ranks, then the sum of its squares.
    """
    return all(num_ranks * squares == total * total for total, squares in zip(sums[::2], sums[1::2], strict=True))
