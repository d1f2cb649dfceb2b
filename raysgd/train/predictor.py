"""`Predictor`: a trained model, the preprocessor that its data goes through first, and batches in any form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raysgd.air.checkpoint import Checkpoint
from raysgd.arrays.ray_batches import stacked

__all__ = ["Predictor", "PredictorNotSerializableException"]

PREDICTIONS = "predictions"
"""The column of a single output."""

_TENSOR = "__value__"
"""The column of an array, where data has to have columns; the name is that of Ray Data."""


class PredictorNotSerializableException(RuntimeError):
    """A predictor was pickled. Send its checkpoint, and make the predictor where it is used."""


class Predictor(ABC):
    """Predicts batch by batch with the model of a checkpoint.

    Override `from_checkpoint`, and one of `_predict_pandas`, which gets a data frame and returns one, and
    `_predict_numpy`, which gets arrays and returns arrays.

    Args:
        preprocessor: A preprocessor of Ray Data that each batch goes through first; None for none.
    """

    def __init__(self, preprocessor: Any = None) -> None:
        self._preprocessor = preprocessor

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> Predictor:
        """Return a predictor with the model of a checkpoint."""

    @classmethod
    def from_pandas_udf(cls, pandas_udf: Callable[[Any], Any]) -> Predictor:
        """Return a predictor that calls a function of a data frame."""
        return FunctionPredictor(pandas_udf)

    def get_preprocessor(self) -> Any:
        """Return the preprocessor; None without one."""
        return self._preprocessor

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Use another preprocessor; None for none."""
        self._preprocessor = preprocessor

    def predict(self, data: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch, in the form that it has itself.

        Args:
            data: An array, a dict of arrays, a data frame of pandas or a table of PyArrow.
            **kwargs: Passed on to `_predict_pandas` or `_predict_numpy`.

        Raises:
            TypeError: The data is something else.
            NotImplementedError: The class overrides neither.
        """
        columns = columns_of(data)
        if self._preprocessor is not None:
            columns = columns_of(self._preprocessor.transform_batch(_as_frame(columns)))
        if type(self)._predict_numpy is not Predictor._predict_numpy:
            found = self._predict_numpy(next(iter(columns.values())) if len(columns) == 1 else columns, **kwargs)
        else:
            found = self._predict_pandas(_as_frame(columns), **kwargs)
        return _in_form_of(data, columns_of(found, PREDICTIONS))

    def _predict_pandas(self, data: Any, **kwargs: Any) -> Any:
        """Return the predictions for a data frame, as one."""
        raise NotImplementedError(f"`{type(self).__name__}` has to override `_predict_pandas` or `_predict_numpy`.")

    def _predict_numpy(self, data: Any, **kwargs: Any) -> Any:
        """Return the predictions for an array, or for a dict of several, as either."""
        raise NotImplementedError(f"`{type(self).__name__}` has to override `_predict_pandas` or `_predict_numpy`.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(preprocessor={self._preprocessor!r:.80})"

    def __reduce__(self) -> Any:
        raise PredictorNotSerializableException(
            f"`{type(self).__name__}` cannot be pickled: send the checkpoint, and call `from_checkpoint` where you "
            "predict. `BatchPredictor` does that."
        )


class TensorPredictor(Predictor):
    """Calls a model with tensors: what the predictors of the frameworks share.

    A batch of one column reaches the model as a tensor, one of several as a dict of tensors. Override `call_model` if
    calling the model is not all.
    """

    def predict(self, data: Any, dtype: Any = None) -> Any:  # type: ignore[override]  # it knows what it takes
        """Return the predictions for a batch, in the form that it has itself; a single output is `predictions`.

        Args:
            data: An array, a dict of arrays, a data frame of pandas or a table of PyArrow.
            dtype: The type of tensors, for all columns or for each in a dict. None for that of the data; float64
                becomes what models have.
        """
        return super().predict(data, dtype=dtype)

    @abstractmethod
    def call_model(self, inputs: Any) -> Any:
        """Return what the model says: a tensor, several by name, or a data frame of your own. Safe to override."""

    @abstractmethod
    def _tensor(self, values: Any, dtype: Any) -> Any:
        """Return an array as a tensor where the model is."""

    @abstractmethod
    def _array(self, tensor: Any) -> Any:
        """Return a tensor as an array."""

    def _predict_numpy(self, data: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, Mapping):
            types = dtype if isinstance(dtype, Mapping) else dict.fromkeys(data, dtype)
            inputs: Any = {name: self._tensor(column, types.get(name)) for name, column in data.items()}
        else:
            inputs = self._tensor(data, next(iter(dtype.values())) if isinstance(dtype, Mapping) else dtype)
        found = self.call_model(inputs)
        if hasattr(found, "columns"):
            return found  # a data frame
        named = found if isinstance(found, Mapping) else {PREDICTIONS: found}
        for output in named.values():
            if not hasattr(output, "__array__"):
                raise ValueError(
                    f"`{type(self).__name__}.call_model` returned a `{type(output).__name__}`: need a tensor, a dict "
                    "of tensors, or a data frame of pandas, which is passed on as it is."
                )
        return {name: self._array(output) for name, output in named.items()}


class FunctionPredictor(Predictor):
    """Calls a function of a data frame.

    Args:
        function: The function; it returns a data frame.
        preprocessor: What its data goes through first.
    """

    def __init__(self, function: Callable[[Any], Any], preprocessor: Any = None) -> None:
        super().__init__(preprocessor)
        self._function = function

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint | None, **kwargs: Any) -> FunctionPredictor:
        """Return a predictor for a function, with the preprocessor of a checkpoint if there is one."""
        return cls(kwargs["function"], checkpoint.get_preprocessor() if checkpoint is not None else None)

    def _predict_pandas(self, data: Any, **kwargs: Any) -> Any:
        return self._function(data, **kwargs)


def columns_of(data: Any, name: str = _TENSOR) -> dict[str, Any]:
    """Return a batch as arrays by name.

    Args:
        data: The batch.
        name: What an array without a name is called.

    Raises:
        TypeError: It is no batch.
    """
    if isinstance(data, np.ndarray):
        return {name: data}
    if isinstance(data, Mapping):
        return {key: stacked(values) for key, values in data.items()}
    data = data.to_pandas() if hasattr(data, "to_pandas") else data  # a table of PyArrow
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
