"""The context of one operator of TensorFlow: what it works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raysgd.engine.shared.types import World
from raysgd.tf.operator.settings import TFSettings
from raysgd.tf.parallel.keras_sync import Synchronizer


@dataclass(frozen=True)
class OperatorContext:
    """The place of one operator among its replicas, and the objects that it works with."""

    settings: TFSettings
    world: World
    synchronizer: Synchronizer = field(default_factory=lambda: Synchronizer(World(rank=0, size=1)))
    strategy: Any = None
