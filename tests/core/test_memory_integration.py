"""Workers reuse the memory that steps free, and do not keep what `setup` has freed."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.torch import TorchTrainer
from tests.core.test_memory import needs_glibc, resident_mib, train_in_thread
from tests.torch.operators_for_tests import LinearOperator


class Reads(LinearOperator):
    """Reads 300 MiB in `setup`, and lets it go."""

    def setup(self, config: dict[str, Any]) -> None:
        before = resident_mib()
        read = [torch.ones(1 << 18) for _ in range(300)]
        self.grown = resident_mib() - before
        del read
        super().setup(config)
        self.before = before


def told(operator: Reads) -> tuple[int, int, int]:
    return operator.grown, resident_mib() - operator.before, train_in_thread()


@needs_glibc
def test_workers_keep_what_steps_free_and_return_what_setup_freed(ray_cluster: None) -> None:
    with TorchTrainer(training_operator_cls=Reads, num_workers=2) as trainer:
        for grown, left, faults in trainer.apply_all_operators(told):
            assert grown >= 250
            assert left < 100
            assert faults < 100
