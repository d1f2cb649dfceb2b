"""Other libraries that read streams: the rows that each rank gets, and positions from which another run continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

BATCH = 10  # per rank


def write(folder: Path, num_files: int, rows_per_file: int) -> None:
    """Write numbered rows, in the format of each installed library."""
    from pyarrow import parquet, table

    (folder / "parquet").mkdir(parents=True)
    for number in range(num_files):
        first = number * rows_per_file
        rows = table({"number": np.arange(first, first + rows_per_file)})
        parquet.write_table(rows, folder / "parquet" / f"{number:05}.parquet")


def write_mosaic(folder: Path, num_files: int, rows_per_file: int) -> None:
    """Write the rows for Mosaic Streaming."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mosaic"), columns={"number": "int"}, size_limit=rows_per_file * 13) as writer:
        for number in range(num_files * rows_per_file):
            writer.write({"number": number})


def write_litdata(folder: Path, num_files: int, rows_per_file: int) -> None:
    """Write the rows for litData."""
    import litdata

    litdata.optimize(
        fn=_as_row,
        inputs=list(range(num_files * rows_per_file)),
        output_dir=str(folder / "litdata"),
        chunk_size=rows_per_file,
        num_workers=1,
    )


def _as_row(number: int) -> dict[str, int]:
    return {"number": number}


WRITERS: dict[str, Callable[..., None]] = {"mosaic": write_mosaic, "litdata": write_litdata}


def _loader_of(name: str, folder: Path) -> tuple[Any, Any]:
    """Return a loader of this rank, and the object that has its position."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == "mosaic":
        from streaming import StreamingDataLoader, StreamingDataset

        rows = StreamingDataset(local=str(folder / name), batch_size=BATCH, shuffle=False, num_canonical_nodes=1)
        loader = StreamingDataLoader(rows, batch_size=BATCH)
        return loader, loader
    if name == "litdata":
        import litdata

        loader = litdata.StreamingDataLoader(
            litdata.StreamingDataset(str(folder / name), shuffle=False), batch_size=BATCH, num_workers=1
        )
        return loader, loader
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    files = sorted(str(each) for each in (folder / "parquet").iterdir())
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))
    rows = split_dataset_by_node(rows, rank, size)
    if name == "datasets":
        return DataLoader(rows, batch_size=BATCH), rows
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(rows, batch_size=BATCH, num_workers=1)
    return loader, loader


def read(name: str, folder: str, num_batches: int | None, resumes: bool) -> list[int]:
    """Read as one of several ranks, from the beginning or from a saved position; return the rows of all ranks.

    Args:
        name: The library.
        folder: The folder that `write` was given.
        num_batches: Number of batches per rank after which to save the position; None to read to the end.
        resumes: Whether to continue from there. A rank that saved no position uses that of rank 0.
    """
    dist.init_process_group("gloo")
    loader, holder = _loader_of(name, Path(folder))
    states = Path(folder) / f"{name}-states"
    states.mkdir(exist_ok=True)
    if resumes:
        own = states / f"{dist.get_rank()}.pt"
        holder.load_state_dict(torch.load(own if own.exists() else states / "0.pt", weights_only=False))
    rows: list[int] = []
    for number, batch in enumerate(_batches(loader), 1):
        rows += [int(each) for each in batch["number"]]
        if number == num_batches:
            torch.save(holder.state_dict(), states / f"{dist.get_rank()}.pt")
            break
    of_all: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, rows)
    return [each for own in of_all for each in own]


def read_with_ray(folder: str, num_ranks: int, num_batches: int | None) -> list[int]:
    """Read with Ray Data, which saves no position: a resumed program begins the epoch again."""
    import ray

    def read_split(split: Any) -> list[int]:
        batches = split.iter_batches(batch_size=BATCH)
        return [int(each) for batch in islice(batches, num_batches) for each in batch["number"]]

    splits = ray.data.read_parquet(f"{folder}/parquet").streaming_split(num_ranks, equal=False)
    with ThreadPoolExecutor(num_ranks) as pool:
        return [each for own in pool.map(read_split, splits) for each in own]


def _batches(loader: Any) -> Iterator[Any]:
    yield from loader
