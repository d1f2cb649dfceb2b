"""Writes the folders in `files/journals`: a run on a dataset, and a run on a stream that resumed inside its pass.

`python -m tests.earlier_files.journals FOLDER`, with raysgd of `PYTHONPATH`. The version of 30 November 2026 (commit
`68bfbe63`) wrote what is there, in the first format, before `steps.bin` had checksums.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from raysgd.callbacks import Checkpointing
from raysgd.torch import TorchTrainer
from tests.replay.programs import Plain
from tests.torch.streamed import StreamOperator


def main(folder: Path) -> None:
    """Write both folders, without the checkpoints that the journals name."""
    with TorchTrainer(training_operator_cls=Plain, use_local=True, seed=2, config={"lr": 0.1}) as trainer:
        trainer.fit(2, folder=folder / "dataset", callbacks=[Checkpointing()], progress=False)
    for steps in (6, 12):
        with TorchTrainer(
            training_operator_cls=StreamOperator,
            use_local=True,
            config={"kind": "filtered"},
            split_batches=True,
            seed=2,
        ) as trainer:
            trainer.fit(
                folder=folder / "stream",
                callbacks=[Checkpointing(every_n_steps=3)],
                max_steps=steps,
                resume_from="auto",
                progress=False,
            )
    for run in ("dataset", "stream"):
        shutil.rmtree(folder / run / "checkpoints")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
