"""`TFRunner`: the replica in each worker, with the parts that are specific to TensorFlow operators.

This class is internal. In programs written for RaySGD's class of the same name, use `TFTrainer` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from raysgd.core.engine.shared.types import World
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.hosting.tf_hosted import TFHostedOperator
from raysgd.tf.objects import registration
from raysgd.tf.training_operator import TFSettings, TrainingOperator
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest
from raysgd.trainer.worker.runner import ClassRunner


class TFRunner(ClassRunner):
    """Runs a user's TensorFlow operator in a worker. The driver calls the methods of this class remotely."""

    _hosted: TFHostedOperator

    def _make_hosted(self, settings: TFSettings, world: World) -> TFHostedOperator:
        return TFHostedOperator(settings, world, self._ledger)

    @property
    def operator(self) -> TrainingOperator:
        """The user's operator in this worker."""
        return self._hosted.operator

    def validate(self, request: EpochRequest, share: Any = None) -> EpochAnswer:
        """Run the operator's `validate` once, on the registered validation dataset or on data passed to the call.

        For operators that call Keras's `evaluate`, data passed to the call temporarily replaces the registered dataset.

        Args:
            request: What to evaluate.
            share: This worker's shard of data that the driver has divided: data that the user passed to
                `trainer.validate(dataset=...)`, or registered Ray Data. None if there is no such data, or if this
                worker already has its shard.
        """
        if request.shard_key is None:
            self._hosted.feed.align_validation()
        if request.shard_key is None or not isinstance(self.operator, CreatorOperator):
            return super().validate(request, share)
        internals, feed = self.operator._raysgd, self._hosted.feed
        registered = internals.data
        feed.take_share("validation", request, share)
        internals.data = replace(registered, validation_dataset=feed.made_of_call["validation"])
        try:
            return super().validate(replace(request, shard_key=None, starts_over=True))
        finally:
            internals.data = registered

    def former_optimizer(self, weights: Sequence[Any]) -> list[Any] | None:
        """Convert the optimizer weights in a `ray.util.sgd` checkpoint to values for the optimizer's variables.

        Return None if the weights do not match the optimizer, or if the operator does not have exactly one optimizer.
        """
        optimizers = self.operator._optimizers
        return checkpoint_file.former_slots(optimizers[0], weights) if len(optimizers) == 1 else None

    def architecture(self) -> list[tuple[str, bool]]:
        """Return each registered model as JSON, without weights, and whether it is compiled with its own optimizer.

        That is the registered optimizer with the model's index. Another one has other variables.
        """
        pairs = zip_longest(self.operator._models, self.operator._optimizers[: len(self.operator._models)])
        return [(registration.model_to_json(model), registration.is_compiled_with(model, own)) for model, own in pairs]
