"""Changes files of checkpoints as somebody would who wants to do harm: past the checksum, where it matters."""

from __future__ import annotations

import io
import json
import math
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.checkpoints.checkpoint_file import seal_at_end_of, seal_of
from raysgd.torch.checkpoints.divided import DIVIDED, REST, part_name

NUMBERS = (0, 1, -1, 2, 127, 255, 65535, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, 10**7)
NAMES = (
    b"numpy\ndtype\n",
    b"numpy\nndarray\n",
    b"numpy.core.multiarray\n_reconstruct\n",
    b"numpy._core.multiarray\nscalar\n",
    b"builtins\nbytearray\n",
    b"builtins\nset\n",
    b"torch._utils\n_rebuild_tensor_v2\n",
    b"torch\nFloatStorage\n",
    b"collections\nOrderedDict\n",
    b"os\nsystem\n",
)
OPCODES = bytes(sorted(getattr(pickle, name)[0] for name in pickle.__all__ if name.isupper() and name[0] != "_"
                       and isinstance(getattr(pickle, name), bytes)))  # fmt: skip
Change = Callable[[random.Random, bytes], bytes]


def flipped(chance: random.Random, content: bytes) -> bytes:
    """A few bits are others."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(changed))
        changed[place] ^= 1 << chance.randrange(8)
    return bytes(changed)


def with_numbers(chance: random.Random, content: bytes) -> bytes:
    """A number stands where another one was, or something else."""
    changed = bytearray(content)
    form = chance.choice(["<B", "<H", "<i", "<I", "<q", "<d", ">d"])
    number = chance.choice(NUMBERS)
    value = float(number) if form[1] == "d" else number % 2 ** (8 * struct.calcsize(form) - 1)
    place = chance.randrange(max(1, len(changed) - 8))
    changed[place : place + struct.calcsize(form)] = struct.pack(form, value)
    return bytes(changed[: len(content)])


def with_opcodes(chance: random.Random, content: bytes) -> bytes:
    """Opcodes stand where others were, or between them; parts are missing, or are there twice."""
    place, length = chance.randrange(len(content)), chance.choice((0, 1, 1, 3, 20))
    start = chance.randrange(len(content))
    inserted = chance.choice(
        (
            bytes([chance.choice(OPCODES)]),
            b"c" + chance.choice(NAMES),
            content[start : start + chance.choice((1, 5, 50))],
            b"K\x05\x85R",
            b"J" + struct.pack("<i", chance.choice(NUMBERS[:9])),
        )
    )
    return content[:place] + inserted + content[place + length :]


def truncated(chance: random.Random, content: bytes) -> bytes:
    """The end is missing."""
    return content[: chance.randrange(1, len(content))]


ANYWHERE: tuple[Change, ...] = (flipped, with_numbers)
IN_A_PICKLE: tuple[Change, ...] = (flipped, with_numbers, with_opcodes, with_opcodes, with_opcodes)


@dataclass(frozen=True)
class Seed:
    """A real file.

    Attributes:
        content: Its bytes.
        change: Changes them.
    """

    content: bytes
    change: Change


def changed_pickle_file(chance: random.Random, content: bytes) -> bytes:
    """A file that is one pickle, or several and what follows them."""
    change = chance.choice((*IN_A_PICKLE, truncated))
    return change(chance, content)


def changed_archive(chance: random.Random, content: bytes) -> bytes:
    """An archive of `torch.save`; where it had our checksum it has a right one again."""
    seal = seal_at_end_of(content)
    if seal is None:
        return _changed_body(chance, content)
    return sealed(_changed_body(chance, content[: -len(seal)]))


def _changed_body(chance: random.Random, body: bytes) -> bytes:
    kind = chance.random()
    if kind < 0.2:
        return chance.choice(ANYWHERE)(chance, body)
    if kind < 0.45:
        return _with_changed_directory(chance, body)
    return _with_changed_member(chance, body, "data.pkl", chance.choice(IN_A_PICKLE))


def _with_changed_directory(chance: random.Random, body: bytes) -> bytes:
    """What an archive says of itself: at its end, and before each member."""
    starts = [at for at in range(len(body) - 4) if body[at : at + 2] == b"PK" and body[at + 2] < 9]
    start = chance.choice(starts)
    changed = bytearray(body)
    part = chance.choice(ANYWHERE)(chance, bytes(changed[start : start + 60]))
    changed[start : start + 60] = part
    return bytes(changed[: len(body)])


def _with_changed_member(chance: random.Random, body: bytes, name: str, change: Change) -> bytes:
    """One member is another: in its place where it fits there, else in a new archive."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    full_name = next(found for found in members if found.rpartition("/")[2] == name)
    before = members[full_name]
    after = change(chance, before)
    if len(after) == len(before):
        return body.replace(before, after, 1)
    return archived({**members, full_name: after})


def archived(members: dict[str, bytes]) -> bytes:
    """An archive as Python writes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def sealed(body: bytes) -> bytes:
    """A file with the checksum of `body`, whatever that has become."""
    if len(body) < 22:
        return body
    comment = seal_of(xxhash.xxh3_128_hexdigest(body[:-2] + bytes(2)))
    return body[:-2] + len(comment).to_bytes(2, "little") + comment


def change_folder(chance: random.Random, folder: Path) -> None:
    """Changes a folder of divided models: its index, or a file, which has a right checksum afterwards."""
    kind = chance.random()
    if kind < 0.3:
        (folder / REST).write_bytes(changed_archive(chance, (folder / REST).read_bytes()))
        return
    rest = checkpoint_file.read(folder / REST)
    facts = rest[DIVIDED]
    if kind < 0.6:
        facts = _with_another_fact(chance, facts)
    else:
        part = folder / part_name(0)
        content = _changed_body(chance, part.read_bytes())
        part.write_bytes(content)
        facts = {**facts, "files": [(len(content), xxhash.xxh3_128_hexdigest(content))]}
    checkpoint_file.write(folder / REST, checkpoint_file.packed({**rest, DIVIDED: facts}))


def _with_another_fact(chance: random.Random, facts: Any) -> Any:
    """Something in an index is something else."""
    return changed_value(chance, facts, lambda _: chance.choice((*VALUES, "../x", (0,), torch.float64)))


VALUES = (*NUMBERS, 10**400, -1.5, 1e30, math.nan, math.inf, True, 1j, "x", b"x", None, (), [], {}, [1.5], {"x": 1})


def changed_value(chance: random.Random, value: Any, other: Callable[[Any], Any]) -> Any:
    """A copy in which one value is another one, or is missing, or is there besides.

    Args:
        chance: What is drawn from.
        value: Dicts, lists and tuples of anything.
        other: Returns what to put in the place of a value.
    """
    if not isinstance(value, dict | list | tuple) or not value or chance.random() < 0.1:
        return other(value)
    pairs: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    at, action = chance.randrange(len(pairs)), chance.random()
    if action < 0.1:
        del pairs[at]
    elif action < 0.15:
        pairs.append((chance.choice(("x", 7, pairs[at][0], -1)), other(pairs[at][1])))
    else:
        pairs[at] = pairs[at][0], changed_value(chance, pairs[at][1], other)
    return dict(pairs) if isinstance(value, dict) else type(value)(item for _, item in pairs)


def changed_state(chance: random.Random, state: Any) -> Any:
    """A copy of a state in which a few values are others."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        state = changed_value(chance, state, lambda value: _another(chance, value))
    return state


def _another(chance: random.Random, value: Any) -> Any:
    """Something else than a value; often much like it."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor) or chance.random() < 0.2:
        return chance.choice(VALUES)
    if not isinstance(value, torch.Tensor):
        alike = (
            -value,
            value + 0.5 if abs(value) < 2**53 else 0.5,
            torch.tensor(value % 2**31),
            torch.zeros(2),
            -0.5,
            1e30,
        )
        return chance.choice((*NUMBERS, *alike))
    shape, tensor = tuple(value.shape), value.detach()
    if tensor.layout != torch.strided or tensor.is_meta:  # one that was changed before
        tensor = torch.zeros(shape)
    whole = tensor if tensor.is_floating_point() else tensor.float()
    return chance.choice((
        lambda: torch.zeros(chance.choice(((), (1,), (0,), shape[::-1], (*shape, 1), (2, *shape), shape[:-1], (999,)))),
        lambda: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape),
        lambda: tensor.to(chance.choice((torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64))),
        lambda: torch.full(whole.shape, chance.choice((math.nan, math.inf, -1.0, 1e38)), dtype=whole.dtype),
        lambda: torch.empty_like(tensor, device="meta"),
        lambda: tensor.to_sparse() if tensor.ndim else tensor,
        lambda: torch.sparse_coo_tensor(
            torch.full((max(1, tensor.ndim), 1), chance.choice((2**40, -1, 10**4))), torch.ones(1), shape or (1,),
            check_invariants=False,
        ),
        lambda: torch.nn.Parameter(whole),
        lambda: whole.clone().requires_grad_(),
        lambda: whole.reshape(-1).tolist(),
        lambda: tensor.T if tensor.ndim == 2 else -tensor.float(),
    ))()  # fmt: skip


def changed_weights(chance: random.Random, content: bytes) -> bytes:
    """A safetensors file: its bytes, its header, or what raysgd says of it."""
    if chance.random() < 0.2:
        return chance.choice((*ANYWHERE, truncated))(chance, content)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if chance.random() < 0.5:
        metadata = header["__metadata__"]
        name = chance.choice(sorted(metadata))
        with_values = changed_value(chance, json.loads(metadata[name]) if name != "format" else "pt", _of_json(chance))
        deep = chance.choice(("[", '{"a":')) * 100_000
        metadata[name] = chance.choice((json.dumps(with_values, default=str), deep, "NaN", "{}", "[]", "-1", "3", "x"))
    else:
        for name in chance.sample(sorted(header), k=chance.choice((1, 2))):
            renamed = chance.choice((name, name.replace("0.", chance.choice(("-1.", "7.", "00.", "x.", "1.", "")))))
            header[renamed] = changed_value(chance, header.pop(name), _of_json(chance))
    packed = json.dumps(header, default=str).encode()
    return len(packed).to_bytes(8, "little") + packed + content[8 + length :]


def _of_json(chance: random.Random) -> Callable[[Any], Any]:
    return lambda value: chance.choice((*NUMBERS, "x", None, [], {}, [0], "F64", "BF16", -1.5, True, [value, value]))


def changed_text(chance: random.Random, content: bytes) -> bytes:
    """A file of JSON: its bytes, or its values."""
    if chance.random() < 0.2:
        return chance.choice((*ANYWHERE, truncated))(chance, content)
    if chance.random() < 0.02:
        return chance.choice((b"[", b'{"a":')) * 100_000
    tree = json.loads(content)
    for _ in range(chance.choice((1, 1, 2))):
        tree = changed_value(chance, tree, _of_json(chance))
    return json.dumps(tree).encode()


def changed_arrays(chance: random.Random, content: bytes) -> bytes:
    """An archive of NumPy's arrays with an index; each member has its checksum."""
    if chance.random() < 0.3:
        return _with_changed_directory(chance, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = chance.choice((*members, "state.json", "state.json"))
    text_changes: Sequence[Change] = (flipped, _with_another_number) if name == "state.json" else ANYWHERE
    return archived({**members, name: chance.choice(text_changes)(chance, members[name])})


def _with_another_number(chance: random.Random, content: bytes) -> bytes:
    """A value of the index is another one."""
    index = json.loads(content)
    holder, key = chance.choice(list(_places(index)))
    holder[key] = chance.choice((*NUMBERS, "x", None, [], {}, {"raysgd": "array", "value": "models/0/0"}, 1.5, True))
    return json.dumps(index).encode()


def _places(tree: object) -> list[tuple[dict[str, object] | list[object], str | int]]:
    pairs: list[tuple[str | int, object]] = []
    if isinstance(tree, dict):
        pairs = list(tree.items())
    elif isinstance(tree, list):
        pairs = list(enumerate(tree))
    found: list[tuple[dict[str, object] | list[object], str | int]] = []
    for key, value in pairs:
        found.append((tree, key))  # type: ignore[arg-type]
        found.extend(_places(value))
    return found
