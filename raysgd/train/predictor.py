"""`Predictor`: predicts with a trained model and its preprocessor. Batches may be NumPy, pandas or PyArrow data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raysgd.air.checkpoint import Checkpoint
from raysgd.core.arrays.user_data import stacked

__all__ = ["Predictor", "PredictorNotSerializableException"]

PREDICTIONS = "predictions"
"""Column name for the output of a model with a single output."""

_TENSOR = "__value__"
"""Column name for an array that has no name. Ray Data uses the same name."""


class PredictorNotSerializableException(RuntimeError):
    """Raised when a predictor is pickled. Send its checkpoint instead, and create the predictor where it is used."""


class Predictor(ABC):
    """Predicts batch by batch with the model of a checkpoint.

    Override `from_checkpoint`, and either `_predict_pandas`, which maps a data frame to a data frame, or
    `_predict_numpy`, which maps arrays to arrays.

    Args:
        preprocessor: A Ray Data preprocessor for the batches, or None.
    """

    def __init__(self, preprocessor: Any = None) -> None:
        self._preprocessor = preprocessor

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> Predictor:
        """Return a predictor for the model in a checkpoint."""

    @classmethod
    def from_pandas_udf(cls, pandas_udf: Callable[[Any], Any]) -> Predictor:
        """Return a predictor that predicts by applying a function to data frames."""
        return FunctionPredictor(pandas_udf)

    def get_preprocessor(self) -> Any:
        """Return the preprocessor that is applied to batches, or None if no preprocessor is set."""
        return self._preprocessor

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Set the preprocessor to apply to batches; None for no preprocessor."""
        self._preprocessor = preprocessor

    def predict(self, data: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch, in the same format as the batch.

        For a NumPy array, several outputs are returned as a dict of arrays.

        Args:
            data: A NumPy array, a dict of arrays, a pandas data frame, or a PyArrow table.
            **kwargs: Passed to `_predict_pandas` or `_predict_numpy`.

        Raises:
            TypeError: The data has another format.
            NotImplementedError: The class overrides neither `_predict_pandas` nor `_predict_numpy`.
        """
        columns = columns_of(data)
        if self._preprocessor is not None:
            columns = columns_of(self._preprocessor.transform_batch(_as_frame(columns)))
        if type(self)._predict_numpy is not Predictor._predict_numpy:
            predictions = self._predict_numpy(next(iter(columns.values())) if len(columns) == 1 else columns, **kwargs)
        else:
            predictions = self._predict_pandas(_as_frame(columns), **kwargs)
        return _in_form_of(data, columns_of(predictions, PREDICTIONS))

    def _predict_pandas(self, data: Any, **kwargs: Any) -> Any:
        """Return the predictions for a data frame, as a data frame."""
        raise NotImplementedError(f"`{type(self).__name__}` has to override `_predict_pandas` or `_predict_numpy`.")

    def _predict_numpy(self, data: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch, as an array or a dict of arrays.

        A batch with one column is passed as an array, a batch with several columns as a dict of arrays.
        """
        raise NotImplementedError(f"`{type(self).__name__}` has to override `_predict_pandas` or `_predict_numpy`.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(preprocessor={self._preprocessor!r:.80})"

    def __reduce__(self) -> Any:
        raise PredictorNotSerializableException(
            f"`{type(self).__name__}` cannot be pickled: send the checkpoint, and call `from_checkpoint` where you "
            "predict. `BatchPredictor` does that."
        )


class TensorPredictor(Predictor):
    """Base class of the predictors for PyTorch and TensorFlow, which call a model with tensors.

    A batch with one column is passed to the model as a tensor, a batch with several columns as a dict of tensors.
    Override `call_model` if calling the model is not enough.
    """

    def predict(self, data: Any, dtype: Any = None) -> Any:  # type: ignore[override]  # it names its only option
        """Return the predictions for a batch, in the same format as the batch. A single output is named `predictions`.

        Args:
            data: A NumPy array, a dict of arrays, a pandas data frame, or a PyArrow table.
            dtype: The dtype of the tensors, or a dict of dtypes by column. None for the dtypes of the data, with the
                framework's default float type instead of float64.
        """
        return super().predict(data, dtype=dtype)

    @abstractmethod
    def call_model(self, inputs: Any) -> Any:
        """Return the model's output. An override may return a tensor, a dict of tensors, or a data frame."""

    @abstractmethod
    def _tensor(self, values: Any, dtype: Any) -> Any:
        """Convert an array to a tensor on the model's device."""

    @abstractmethod
    def _array(self, tensor: Any) -> Any:
        """Convert a tensor to a NumPy array."""

    def _predict_numpy(self, data: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, Mapping):
            types = dtype if isinstance(dtype, Mapping) else dict.fromkeys(data, dtype)
            inputs: Any = {name: self._tensor(column, types.get(name)) for name, column in data.items()}
        else:
            inputs = self._tensor(data, next(iter(dtype.values())) if isinstance(dtype, Mapping) else dtype)
        outputs = self.call_model(inputs)
        if hasattr(outputs, "columns"):
            return outputs  # `call_model` returned a data frame
        named = outputs if isinstance(outputs, Mapping) else {PREDICTIONS: outputs}
        for output in named.values():
            if not hasattr(output, "__array__"):
                raise ValueError(
                    f"`{type(self).__name__}.call_model` returned a `{type(output).__name__}`: need a tensor, a dict "
                    "of tensors, or a data frame of pandas, which is passed on as it is."
                )
        return {name: self._array(output) for name, output in named.items()}


class FunctionPredictor(Predictor):
    """Predicts by applying a function to data frames.

    Args:
        function: Takes a data frame of inputs and returns a data frame of predictions.
        preprocessor: The preprocessor for the batches.
    """

    def __init__(self, function: Callable[[Any], Any], preprocessor: Any = None) -> None:
        super().__init__(preprocessor)
        self._function = function

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint | None, **kwargs: Any) -> FunctionPredictor:
        """Return a predictor that applies the checkpoint's preprocessor, if any, and then a function to data frames.

        The keyword argument `function` is required.
        """
        return cls(kwargs["function"], checkpoint.get_preprocessor() if checkpoint is not None else None)

    def _predict_pandas(self, data: Any, **kwargs: Any) -> Any:
        return self._function(data, **kwargs)


def columns_of(data: Any, name: str = _TENSOR) -> dict[str, Any]:
    """Return a batch as a dict of arrays.

    Args:
        data: Batch in one of the formats of `Predictor.predict`.
        name: Column name for an array that has no name.

    Raises:
        TypeError: `data` is not in a batch format.
    """
    if isinstance(data, np.ndarray):
        return {name: data}
    if isinstance(data, Mapping):
        return {key: stacked(values) for key, values in data.items()}
    data = data.to_pandas() if hasattr(data, "to_pandas") else data  # of these, only PyArrow tables have `to_pandas`
    if not hasattr(data, "columns"):
        raise TypeError(
            f"`data={data!r:.200}`: need an array of NumPy, a dict of arrays, a data frame or a table of PyArrow."
        )
    return {str(key): stacked(data[key].to_numpy()) for key in data.columns}


def _as_frame(columns: Mapping[str, Any]) -> Any:
    import pandas as pd

    return pd.DataFrame({name: list(each) if np.ndim(each) > 1 else each for name, each in columns.items()})


def _in_form_of(data: Any, columns: dict[str, Any]) -> Any:
    if isinstance(data, np.ndarray) and len(columns) == 1:
        return next(iter(columns.values()))
    if isinstance(data, Mapping | np.ndarray):
        return columns
    if not hasattr(data, "to_pandas"):
        return _as_frame(columns)
    import pyarrow as pa

    return pa.table({name: each.tolist() if np.ndim(each) > 1 else each for name, each in columns.items()})
