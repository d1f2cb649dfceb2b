"""`BatchPredictor`: several workers predict on a Ray Data dataset with the model of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from raysgd.air.checkpoint import Checkpoint
from raysgd.core.arguments import check_num_workers
from raysgd.core.arrays.user_data import is_of_ray
from raysgd.train.predictor import FunctionPredictor, Predictor, columns_of

__all__ = ["BatchPredictor"]


class BatchPredictor:
    """Predicts on a Ray Data dataset. Each worker creates its predictor from the checkpoint once.

    To predict with the workers and the model of a trainer that is still training, see `trainer.predict`.

    Args:
        checkpoint: The checkpoint, such as `result.checkpoint`.
        predictor_cls: The class that predicts with the checkpoint's model, such as `TorchPredictor`.
        **predictor_kwargs: Passed to `predictor_cls.from_checkpoint`.

    Raises:
        TypeError: `predictor_cls` is not a subclass of `Predictor`, or `checkpoint` is not a raysgd checkpoint.

    Examples:
        >>> from raysgd.train.torch import TorchPredictor
        >>> predictor = BatchPredictor.from_checkpoint(result.checkpoint, TorchPredictor)  # doctest: +SKIP
        >>> predictor.predict(dataset, feature_columns=["x"]).to_pandas()  # doctest: +SKIP
    """

    def __init__(self, checkpoint: Checkpoint, predictor_cls: type[Predictor], **predictor_kwargs: Any) -> None:
        if not isinstance(predictor_cls, type) or not issubclass(predictor_cls, Predictor):
            raise TypeError(
                f"`predictor_cls={predictor_cls!r}`: need a subclass of `raysgd.train.predictor.Predictor`."
            )
        if not isinstance(checkpoint, Checkpoint) and predictor_cls is not FunctionPredictor:
            raise TypeError(
                f"`checkpoint={checkpoint!r:.200}`: need a `raysgd.air.Checkpoint`. Those of Ray have the same name, "
                "but are another class: `raysgd.air.Checkpoint(checkpoint.path)` reads the same folder."
            )
        self._checkpoint, self._predictor_cls, self._kwargs = checkpoint, predictor_cls, predictor_kwargs
        self._preprocessor = checkpoint.get_preprocessor() if checkpoint is not None else None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, predictor_cls: type[Predictor], **kwargs: Any) -> BatchPredictor:
        """Return a `BatchPredictor` for the model in a checkpoint. The arguments are those of the class."""
        return cls(checkpoint, predictor_cls, **kwargs)

    @classmethod
    def from_pandas_udf(cls, pandas_udf: Callable[[Any], Any]) -> BatchPredictor:
        """Return a `BatchPredictor` that predicts by applying a function to data frames."""
        without_checkpoint: Any = None
        return cls(without_checkpoint, FunctionPredictor, function=pandas_udf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(checkpoint={self._checkpoint!r}, predictor_cls={self._predictor_cls.__name__})"

    def get_preprocessor(self) -> Any:
        """Return the preprocessor for the batches: the preprocessor that you have set, or else the checkpoint's.

        Return None if there is no preprocessor.
        """
        return self._preprocessor

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Set the preprocessor for the batches; None for no preprocessor."""
        self._preprocessor = preprocessor

    def predict(
        self,
        data: Any,
        *,
        feature_columns: Sequence[str] | None = None,
        keep_columns: Sequence[str] | None = None,
        batch_size: int = 4096,
        min_scoring_workers: int = 1,
        max_scoring_workers: int | None = None,
        num_cpus_per_worker: int | None = None,
        num_gpus_per_worker: int | None = None,
        separate_gpu_stage: bool = True,
        ray_remote_args: dict[str, Any] | None = None,
        **predict_kwargs: Any,
    ) -> Any:
        """Return a dataset with the predictions. They are computed when the dataset is read.

        Args:
            data: A Ray Data dataset.
            feature_columns: Columns that the model receives, as the preprocessor names them; None for all columns.
            keep_columns: Columns to add to the predictions, as the preprocessor returns them.
            batch_size: Number of rows in each batch that is passed to the predictor.
            min_scoring_workers: Minimum number of workers.
            max_scoring_workers: Maximum number of workers; None for as many as the resources allow.
            num_cpus_per_worker: CPUs per worker; None for one CPU.
            num_gpus_per_worker: GPUs per worker; None for no GPU.
            separate_gpu_stage: True to run the preprocessor in separate workers if the model needs GPUs.
            ray_remote_args: Other Ray options for the workers.
            **predict_kwargs: Passed to each predictor's `predict`.

        Raises:
            TypeError: `data` is not a Ray Data dataset.
            ValueError: A number is out of range.
        """
        if not is_of_ray(data):
            raise TypeError(f"`data={data!r:.200}`: need a dataset of Ray Data. `Predictor.predict` takes batches.")
        check_num_workers("min_scoring_workers", min_scoring_workers, "Leave it out for one.")
        from ray.data import ActorPoolStrategy

        preprocessor, kwargs = self._preprocessor, self._kwargs
        if num_gpus_per_worker:
            kwargs = {"use_gpu": True, **kwargs}
            if preprocessor is not None and separate_gpu_stage:
                data, preprocessor = preprocessor.transform(data), None
        return data.map_batches(
            _Scorer,
            fn_constructor_args=(self._checkpoint, self._predictor_cls, kwargs, preprocessor),
            fn_kwargs={"features": feature_columns, "kept": keep_columns or (), "options": predict_kwargs},
            batch_size=batch_size,
            batch_format="numpy",
            compute=ActorPoolStrategy(min_size=min_scoring_workers, max_size=max_scoring_workers),
            num_cpus=num_cpus_per_worker,
            num_gpus=num_gpus_per_worker,
            **(ray_remote_args or {}),
        )

    def predict_pipelined(self, data: Any, **options: Any) -> NoReturn:
        """Raise an error: Ray Data has no pipelines anymore. Use `predict`, which reads the data block by block.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "`predict_pipelined`: Ray Data has no `DatasetPipeline` any more. Call `predict` and iterate over what it "
            "returns: one block after the other is read and predicted."
        )


class _Scorer:
    """The object that predicts batches in one Ray Data worker."""

    def __init__(
        self, checkpoint: Checkpoint, predictor_cls: type[Predictor], kwargs: Mapping[str, Any], preprocessor: Any
    ) -> None:
        self._predictor = predictor_cls.from_checkpoint(checkpoint, **kwargs)
        self._predictor.set_preprocessor(None)  # `__call__` applies the preprocessor itself, before selecting columns
        self._preprocessor = preprocessor

    def __call__(
        self, batch: Any, features: Sequence[str] | None, kept: Sequence[str], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the predictions for a batch, as a dict of columns.

        Args:
            batch: The batch, as Ray Data passes it.
            features: Columns of the preprocessed batch that the model receives; None for all.
            kept: Columns of the preprocessed batch to add to the predictions.
            options: Keyword arguments for the predictor's `predict`.
        """
        if self._preprocessor is not None:
            batch = columns_of(self._preprocessor.transform_batch(batch))
        inputs = {name: batch[name] for name in features} if features is not None else batch
        return {**self._predictor.predict(inputs, **options), **{name: batch[name] for name in kept}}
