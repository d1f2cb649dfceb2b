"""A program that fits a function, and is started again until it is done."""

from __future__ import annotations

import sys
from pathlib import Path

import ray

from raysgd.train import RunConfig, ScalingConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from tests.helpers.ray_start import patient_ray
from tests.train.left_functions import fit_in_steps


def main() -> None:
    """Fit until all steps are done, or a signal comes."""
    folder = Path(sys.argv[1])
    with patient_ray():
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    run = folder / "runs" / "steps"
    if DataParallelTrainer.can_restore(run):
        trainer = DataParallelTrainer.restore(run)
    else:
        config = {"folder": str(folder), "num_steps": 60, "save_every": 1000, "step_s": 0.1}
        trainer = DataParallelTrainer(
            fit_in_steps,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(folder / "runs"), name="steps"),
        )
    result = trainer.fit()
    (folder / "done").write_text(str(result.metrics["step"]))


if __name__ == "__main__":
    main()
