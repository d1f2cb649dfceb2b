"""The operator for `TFTrainer(model_creator, data_creator)`. It runs Keras's own `fit` and `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raysgd.core.arguments import check_creator
from raysgd.core.connections import tensorflow as connections
from raysgd.exceptions import NoDataError
from raysgd.tf.data.sources import lockstep_dataset
from raysgd.tf.fit import acts_on_steps, callbacks_of_part, merger, one_part, plain, stopper, tracker
from raysgd.tf.objects import datasets, registration
from raysgd.tf.objects.datasets import check_dataset, is_divided
from raysgd.tf.parallel import global_metrics
from raysgd.tf.parallel.keras_sync import refuse_xla
from raysgd.tf.training_operator import TrainingOperator

_FIT_CONFIG, _EVALUATE_CONFIG = "fit_config", "evaluate_config"
_DEFAULT_BATCH_SIZE = 32  # Keras's default for arrays of validation data

# Keras callbacks that only rank 0 runs, because they would write the same data on every rank. If rank 0 is replaced,
# the new rank 0 continues their files.
_ONLY_ON_FIRST = {"ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger", "RemoteMonitor", "ProgbarLogger"}


class CreatorOperator(TrainingOperator):
    """Trains a compiled model with Keras's `fit`. `make_operator` creates a subclass for two creator functions."""

    _model_creator: Callable[[dict[str, Any]], Any]
    _data_creator: Callable[[dict[str, Any]], Any]
    _has_created = False
    _begun: Collection[int] = ()  # ids of the callbacks that this process has used in the current `fit`

    def setup(self, config: dict[str, Any]) -> None:
        """Call the user's creator functions and register the model and datasets that they return.

        If `setup` has been called before, do nothing.
        """
        if self._has_created:
            return
        self._has_created = True
        train_dataset, test_dataset = self._create_data(config)
        self.model = self._model_creator(config)
        registration.models_of(self.model)
        registration.require_compiled(self.model, "`model_creator`")
        if self._steps_with_others:
            refuse_xla(self.model)
        self.register(models=self.model)
        self._keep_optimizers()
        self.register_data(train_dataset=train_dataset, validation_dataset=test_dataset, sharding="global")

    def _keep_optimizers(self) -> None:
        """Register the model's current optimizers again, because a user's later `compile` call replaces them."""
        record = self._raysgd.registered
        self._raysgd.registered = replace(record, optimizers=registration.optimizers_in(self.model))

    def _create_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        created = self._data_creator(config)
        if not isinstance(created, list | tuple) or len(created) != 2:
            what = f"{len(created)} objects" if isinstance(created, list | tuple) else f"a `{type(created).__name__}`"
            raise ValueError(
                f"`data_creator` returned {what}: return two datasets, one to train on and one to test on, which may "
                "be None."
            )
        if created[0] is None:
            raise ValueError("`data_creator` returned None as the train dataset: return a `tf.data.Dataset`.")
        for name, dataset in zip(("train dataset", "test dataset"), created, strict=True):
            if dataset is not None:
                check_dataset(name, dataset)
        return created[0], created[1]

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Run Keras's `fit` once, with the options in `fit_config`. Return the latest value of each metric.

        Each value is returned twice, under Keras's name and with the prefix `train_`. For example, the loss is returned
        as `loss` and as `train_loss`.

        `num_steps` overrides the option `steps_per_epoch`. `fit` draws its batches itself, so `iterator` is not used.
        """
        options = dict(self.config.get(_FIT_CONFIG) or {})
        if num_steps is not None:
            options["steps_per_epoch"] = num_steps
        options["verbose"] = self._verbosity(options)
        options["callbacks"] = self._callbacks(options)
        options.setdefault("shuffle", False)  # Keras warns about its default, True, which has no effect on a dataset
        with self._raysgd.context.synchronizer.merging_metrics():
            logs = self._fit_together(options) if self._steps_with_others else self._fit_alone(options)
        return self.results_of(logs)

    @staticmethod
    def results_of(logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of `train`: Keras's values under Keras's names and with the prefix `train_`."""
        return {**{f"train_{name}": value for name, value in logs.items()}, **logs}

    def _fit_alone(self, options: dict[str, Any]) -> dict[str, Any]:
        if isinstance(options.get("validation_data"), datasets.PackedDataset):
            options["validation_data"] = options["validation_data"].make()
        stream = self._raysgd.fit
        stream.go_to_next_pass()
        # Keras's `fit` creates one iterator too many. On a shuffled dataset, that iterator would count as a pass and
        # change the order of the next pass. It has no effect on the dataset that `counted` returns.
        history = self.model.fit(stream.passes.counted(0), **options)
        return {} if history is None else {name: _last(values) for name, values in history.history.items()}

    def _fit_together(self, options: dict[str, Any]) -> Mapping[str, Any]:
        """Run Keras's `fit` together with other ranks. If a `fit` was interrupted, continue that `fit`.

        Return the latest value of each metric, under Keras's names.
        """
        synchronizer, stream, model = self._raysgd.context.synchronizer, self._raysgd.fit, self.model
        synchronizer.watch_model(model)  # in every call, because the user may have compiled the model again
        self._keep_optimizers()
        if synchronizer.group.size > 1:
            registration.refuse_unreduced_loss(model)
        stream.steps_per_execution = registration.steps_per_execution(model)
        is_resumed = stream.begin_fit(options.get("initial_epoch", 0))
        if is_resumed:
            self._agree()
        else:
            model.stop_training = False
        with synchronizer.fitting(stream.before_exchange):
            self._fit_rest(options, is_resumed)
        if is_resumed:  # `EarlyStopping` may have restored different weights on a rank that joined late: use rank 0's
            global_metrics.share_first(synchronizer.group, model.weights)
        assert stream.place is not None
        return stream.place.logs

    def _fit_rest(self, options: dict[str, Any], is_resumed: bool) -> None:
        """Train the remaining epochs of a `fit`. If an epoch was interrupted, finish that epoch first."""
        num_epochs, stream, model = options.get("epochs", 1), self._raysgd.fit, self.model
        assert stream.place is not None
        if stream.place.is_over:
            return
        rates = registration.read_rates([model.optimizer]) if is_resumed else [None]
        if stream.place.num_steps:
            self._fit_epochs(options, stream.place.epoch + 1, rates, is_last=False)
        if stream.place.epoch < num_epochs and not model.stop_training:
            self._fit_epochs(options, num_epochs, [None], is_last=True)
        elif is_resumed:  # no epoch is left, so do what Keras does at the end of `fit`
            if hasattr(model.optimizer, "finalize_variable_values"):
                model.optimizer.finalize_variable_values(model.trainable_weights)
            for callback in options["callbacks"]:
                callback.on_train_end(dict(stream.place.logs))
        stream.commit()

    def _fit_epochs(self, options: dict[str, Any], end: int, rates: registration.Rates, is_last: bool) -> None:
        stream, model, steps = self._raysgd.fit, self.model, options.get("steps_per_epoch")
        place = stream.place
        assert place is not None
        length = stream.num_steps_of_epoch(steps)
        track = tracker(stream, model, steps, self._agree, rates)
        synchronizer = self._raysgd.context.synchronizer
        data, shares = self._validation_options(options)
        merge = merger(
            model,
            lambda: global_metrics.merge_statistics(synchronizer.group, [model]),
            lambda: synchronizer.evaluating(shares),
        )
        own, num_epochs = options["callbacks"], options.get("epochs", 1)
        listed = [merge, *own, *self._stoppers(own), track]
        is_at_end = length is not None and place.num_steps >= length  # the epoch was interrupted after its last step
        progress = {"verbose": 0 if is_at_end else options["verbose"], "epochs": num_epochs, "steps": length}
        callbacks = callbacks_of_part(model, listed, place.num_steps, **progress)
        goes_on = stream.measures and place.num_steps > 0
        if stream.has_begun:
            self._begin_writers([each for each in own if id(each) not in self._begun], place.epoch if goes_on else None)
        self._begun = {*map(id, own)}
        if is_at_end:
            self._end_epoch(own, callbacks, data)
            return
        options = {name: value for name, value in options.items() if not name.startswith("validation_")} | data
        changed = {"initial_epoch": place.epoch, "epochs": end, "callbacks": callbacks}
        if steps is not None:
            changed["steps_per_epoch"] = steps - place.num_steps
        silenced = [
            *(["on_train_begin"] if stream.has_begun else []),
            *(["on_epoch_begin"] if goes_on else []),
            *([] if is_last else ["on_train_end"]),
        ]
        stream.has_begun = True
        with one_part(model, own, goes_on, silenced, is_last):
            model.fit(self._part(stream.data()), **{**options, **changed})

    def _begin_writers(self, callbacks: Sequence[Any], epoch: int | None) -> None:
        """Start the callbacks that only rank 0 runs. Called if this worker became rank 0 in the middle of a `fit`.

        Args:
            callbacks: The callbacks to start.
            epoch: The current epoch, or None between two epochs.
        """
        for callback in callbacks:
            if "BackupAndRestore" in registration.class_names(callback):
                continue  # its `on_train_begin` would overwrite the model with the last backup
            if "CSVLogger" in registration.class_names(callback):
                callback.append = True  # append to the CSV file that the previous rank 0 has written
            callback.on_train_begin()
            if epoch is not None:
                callback.on_epoch_begin(epoch)

    def _end_epoch(self, own: Sequence[Any], callbacks: Any, data: Mapping[str, Any]) -> None:
        """Validate and call the callbacks, as Keras does after the last step of an epoch.

        Called if an epoch was interrupted after its last step, so that only this work is left.

        Args:
            own: The user's callbacks.
            callbacks: All callbacks, as a Keras `CallbackList`.
            data: The validation options of `fit`.
        """
        stream, model, frequency = self._raysgd.fit, self.model, data.get("validation_freq", 1)
        assert stream.place is not None
        epoch = stream.place.epoch
        if not stream.has_begun:
            model.reset_metrics()
            for callback in own:
                callback.on_train_begin()
                callback.on_epoch_begin(epoch)
        stream.has_begun = True
        logs = dict(model.get_metrics_result())
        if data and ((epoch + 1) % frequency == 0 if isinstance(frequency, int) else epoch + 1 in frequency):
            results = model.evaluate(data["validation_data"], callbacks=callbacks, verbose=0, return_dict=True)
            logs |= {f"val_{name}": value for name, value in results.items()}
        model.history.on_train_begin()  # initializes the history, which `on_epoch_end` appends to
        callbacks.on_epoch_end(epoch, logs)

    def _stoppers(self, callbacks: Sequence[Any]) -> list[Any]:
        """Return a list with a callback that stops all ranks at the same step if one rank's callback stops training.

        Callbacks that only rank 0 runs are ignored. If no other callback overrides a method that Keras calls in each
        step, return an empty list.
        """
        group = self._raysgd.context.synchronizer.group

        def is_anyone(is_this_one: bool) -> bool:
            return bool(group.largest(float(is_this_one)))

        shared = [callback for callback in callbacks if _ONLY_ON_FIRST.isdisjoint(registration.class_names(callback))]
        is_needed = is_anyone(any(acts_on_steps(self.model, callback) for callback in shared))
        return [stopper(self.model, is_anyone)] if is_needed else []

    def _validation_options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return a pair: this rank's validation options for `fit`, and whether raysgd shards the validation data."""
        data = options.get("validation_data")
        if data is None:
            return {}, False
        batch_size = options.get("validation_batch_size") or _DEFAULT_BATCH_SIZE
        dataset = datasets.evaluation_dataset("config['fit_config']['validation_data']", data, batch_size)
        dataset = datasets.in_first_order(dataset)
        part = self._part_to_evaluate(dataset, options.get("validation_steps"))
        frequency = options.get("validation_freq", 1)
        return {"validation_data": part, "validation_freq": frequency}, is_divided(dataset)

    def _agree(self) -> None:
        """Copy rank 0's learning rate, `stop_training` flag and best metric values of `ModelCheckpoint` to all ranks.

        Workers that joined in the middle of the `fit` have missed the changes of earlier epochs.
        """
        synchronizer, model = self._raysgd.context.synchronizer, self.model
        [rate] = registration.read_rates([model.optimizer])
        keepers = self._keepers()
        bests = (math.nan if each.best is None else float(each.best) for each in keepers)
        shared = np.array([float(bool(model.stop_training)), rate or 0.0, *bests])
        synchronizer.group.from_first(shared)
        model.stop_training = bool(shared[0])
        if rate is not None and rate != shared[1]:
            registration.set_rates([shared[1]], [model.optimizer])
        for callback, best in zip(keepers, shared[2:], strict=True):
            if self.world_rank and not math.isnan(best):
                callback.best = float(best)

    def validate(
        self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None, num_steps: int | None = None
    ) -> dict[str, Any]:
        """Run Keras's `evaluate` once, with the options in `evaluate_config`.

        Return the metrics, under Keras's names with the prefix `validation_`. If raysgd shards the dataset, the ranks
        split the samples.

        `num_steps` overrides the option `steps`. `evaluate` draws its batches itself, so `val_iterator` is not used.
        """
        dataset = self.validation_dataset
        if dataset is None:
            raise NoDataError("`validate` needs a test dataset, but `data_creator` returned None instead.")
        options = dict(self.config.get(_EVALUATE_CONFIG) or {})
        options["verbose"], options["return_dict"] = self._verbosity(options), True
        if num_steps is not None:
            options["steps"] = num_steps
        if not self._steps_with_others:
            results = self.model.evaluate(dataset, **options)
        else:
            results = self._evaluate_together(dataset, options.pop("steps", None), options)
        if results is None:
            return {}
        return {f"validation_{name}": _last(value) for name, value in results.items()}

    @property
    def _steps_with_others(self) -> bool:
        """True if raysgd controls the steps of Keras's `fit`.

        This is the case if other ranks exist or may join later, or if snapshots are taken in the middle of an epoch.
        """
        return self._raysgd.context.synchronizer.watches

    def _part(self, dataset: Any) -> Any:
        """Return this rank's part of the training dataset."""
        world = self._raysgd.context.world
        if is_divided(dataset):
            return datasets.part_of(dataset, world.rank, world.size)
        pieces = datasets.own_part_of(dataset, world.size)
        if not world.is_distributed:
            return pieces
        return lockstep_dataset(pieces, connections.votes())

    def warm_up(self) -> None:
        """Train on a batch of zeros, to do one-time work such as tracing before the worker joins a group."""
        part = self._part(self.train_dataset)
        self._raysgd.context.synchronizer.watch_model(self.model)
        self.model.fit(datasets.zeros_like(part), verbose=0, shuffle=False)

    def _part_to_evaluate(self, dataset: Any, steps: int | None) -> Any:
        """Return this rank's part of an evaluation dataset.

        Args:
            dataset: The dataset. If raysgd does not divide it, each rank has its own dataset.
            steps: Number of batches to evaluate, or None. For a divided dataset, it counts the batches of the whole
                dataset. Otherwise, it counts the batches of each rank.
        """
        world = self._raysgd.context.world
        if is_divided(dataset):
            whole = dataset if steps is None else dataset.take(steps)
            return datasets.part_of(whole, world.rank, world.size)
        part = datasets.own_part_of(dataset, world.size)
        return part if steps is None else part.take(steps)

    def _evaluate_together(self, dataset: Any, steps: int | None, options: dict[str, Any]) -> Any:
        synchronizer = self._raysgd.context.synchronizer
        synchronizer.watch_model(self.model)
        part = self._part_to_evaluate(dataset, steps)
        with synchronizer.merging_metrics(), synchronizer.evaluating(is_divided(dataset)):
            return self.model.evaluate(part, **options)

    def _verbosity(self, options: dict[str, Any]) -> Any:
        asked = options.get("verbose", self._raysgd.context.settings.verbose)
        return 0 if self.world_rank else 1 if asked == "auto" else int(asked)

    def _keepers(self) -> list[Any]:
        """Return the user's `ModelCheckpoint` callbacks. They are in every rank's config, but only rank 0 runs them."""
        listed = listed_callbacks(self.config.get(_FIT_CONFIG) or {})
        return [
            each for each in listed if "ModelCheckpoint" in registration.class_names(each) and hasattr(each, "best")
        ]

    def _callbacks(self, options: dict[str, Any]) -> list[Any]:
        callbacks = listed_callbacks(options)
        if self.world_rank == 0:
            return callbacks
        return [callback for callback in callbacks if _ONLY_ON_FIRST.isdisjoint(registration.class_names(callback))]


def make_operator(
    model_creator: Callable[[dict[str, Any]], Any],
    data_creator: Callable[[dict[str, Any]], Any],
) -> type[TrainingOperator]:
    """Create an operator class from creator functions for a compiled model and for the datasets.

    Raises:
        ValueError: A creator is not a function of the config.
    """
    for name, creator in (("model_creator", model_creator), ("data_creator", data_creator)):
        check_creator(name, creator, "config")
    members = {"_model_creator": staticmethod(model_creator), "_data_creator": staticmethod(data_creator)}
    return type("CustomCreatorOperator", (CreatorOperator,), members)


def listed_callbacks(options: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks in the options of Keras's `fit` as a list, even if the user passed a single callback."""
    callbacks = options.get("callbacks") or []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _last(values: Any) -> Any:
    """Return a metric's value, as a Python number if it is a scalar. If a list has a value per epoch, use the last."""
    return plain(values[-1] if isinstance(values, list | tuple) and values else values)
