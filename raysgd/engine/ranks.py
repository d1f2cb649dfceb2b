"""Pure: where the workers live -> who is who."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from raysgd.engine.types import WorkerInfo, World


def assign(infos: Sequence[WorkerInfo]) -> list[World]:
    """Gives each worker its place; world ranks follow the order of `infos`, local ranks count up node by node."""
    seen: Counter[str] = Counter()
    sizes = Counter(info.node_id for info in infos)
    node_ranks = {node: index for index, node in enumerate(dict.fromkeys(info.node_id for info in infos))}
    worlds = []
    for rank, info in enumerate(infos):
        worlds.append(
            World(
                rank=rank,
                size=len(infos),
                local_rank=seen[info.node_id],
                local_size=sizes[info.node_id],
                node_rank=node_ranks[info.node_id],
                num_nodes=len(node_ranks),
                gpu_ids=info.gpu_ids,
                node_gpu_ids=_in_order(
                    gpu for other in infos if other.node_id == info.node_id for gpu in other.gpu_ids
                ),
            )
        )
        seen[info.node_id] += 1
    return worlds


def _in_order(gpu_ids: Iterable[str]) -> tuple[str, ...]:
    """Each once; numbers by their value."""
    return tuple(sorted(set(gpu_ids), key=lambda gpu: (not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu)))
