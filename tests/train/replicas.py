"""Replicas that run functions, for tests without workers."""

from __future__ import annotations

from typing import Any

from raysgd.core.state.state_codec import lend
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import FunctionEnded, FunctionMessage, FunctionSpec
from raysgd.train.constants import TIMESTAMP


def spec(function: Any, **options: Any) -> FunctionSpec:
    return FunctionSpec(function, options.pop("encode", dict), options.pop("score_attribute", TIMESTAMP), **options)


def begin(replica: FunctionReplica, function: Any, checkpoint: Any = None, shard: Any = None, **options: Any) -> None:
    replica.start(spec(function, **options), None if checkpoint is None else lend(checkpoint), shard)


def user_keys(message: FunctionMessage | FunctionEnded) -> dict[str, Any]:
    return {key: value for key, value in message.data.items() if not key.startswith("_")}
