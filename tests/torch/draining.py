"""A training on nodes of which one is announced to go away."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

from raysgd.torch import TorchTrainer
from tests.torch.ledger import Ledger, uses


def announce_end(node_id: str) -> None:
    """Tells Ray that the node will be taken away in a minute, as an autoscaler would."""
    protocol: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    reason = protocol.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    worker: Any = importlib.import_module("ray._private.worker").global_worker
    deadline_ms = int((time.time() + 60) * 1000)
    is_accepted, message = worker.gcs_client.drain_node(node_id, reason, "preempted", deadline_ms)
    assert is_accepted, message


def drained() -> dict[str, Any]:
    """What came of a training on three nodes of which one is going away. That node is gone for good afterwards."""
    config = {"num_samples": 960, "step_s": 0.3, "slow_size": 3}  # half a minute to notice, and no step more
    with TorchTrainer(training_operator_cls=Ledger, num_workers=3, config=config) as trainer:
        leaving = trainer.worker_group.infos[1].node_id
        threading.Timer(0.5, announce_end, [leaving]).start()
        results, sizes = [], []
        for _ in range(2):
            results.append(trainer.train())
            sizes.append(trainer.num_workers)
        status = trainer.status()
        return {
            "kinds": [event.kind for event in status.events if event.kind != "started"],
            "sizes": sizes,
            "uses": sorted(uses(trainer)),
            "num_samples": [result["num_samples"] for result in results],
            "num_failures": status.num_failures,
            "was still used": leaving in [info.node_id for info in trainer.worker_group.infos],
        }
