"""Pure: ids of GPUs and lists of them, as `CUDA_VISIBLE_DEVICES` holds them -> ordinals of CUDA.

An id is a number or a name such as `GPU-8932f937`. CUDA counts the GPUs that a process may see, in the order of the
list; without a list it counts all of the machine.

Why workers see one another's GPUs: ADR 55.
"""

from __future__ import annotations

from collections.abc import Sequence


def ordinal_of(gpu_id: str, visible: str | None) -> int:
    """The ordinal of a GPU in a process, given the process's list; None or an empty list means all of the machine.

    Raises:
        RuntimeError: The process cannot see that GPU.

    Examples:
        >>> ordinal_of("3", visible="1,3"), ordinal_of("3", visible=None)
        (1, 3)
    """
    listed = _ids(visible)
    if not listed and gpu_id.isdigit():
        return int(gpu_id)
    if gpu_id not in listed:
        raise RuntimeError(
            f"GPU {gpu_id} is reserved for the worker in this process, which cannot see it: "
            f"`CUDA_VISIBLE_DEVICES={visible or ''}`. Start the process with that GPU visible, or with none hidden."
        )
    return listed.index(gpu_id)


def visible_to_all(own: str, of_node: Sequence[str]) -> tuple[str, int]:
    """The list with which a worker sees the GPUs of all workers of its node, and the ordinal of its first one.

    Args:
        own: The worker's list.
        of_node: The lists of all workers of the node, in the order of their local ranks.

    Examples:
        >>> visible_to_all("2", ["0", "2"])
        ('0,2', 1)
    """
    if not own or not all(of_node):
        return own, 0  # a process sees all GPUs of the machine, or none: there is nothing to add up
    union = list(dict.fromkeys(identity for listed in of_node for identity in _ids(listed)))
    return ",".join(union), union.index(_ids(own)[0])


def _ids(listed: str | None) -> list[str]:
    return [identity.strip() for identity in (listed or "").split(",") if identity.strip()]
