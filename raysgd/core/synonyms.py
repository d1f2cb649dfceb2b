"""Maps options and callbacks of other libraries to their equivalents in raysgd, for error messages.

Users of `transformers.Trainer`, Lightning, Keras and accelerate try the names that they know. The result of
`instead_of` depends on where the option was passed: to an operator's trainer, to a training function's trainer, or to a
callback. The table is `synonyms.ini`.
"""

from __future__ import annotations

from raysgd.core.tables import read_table

TORCH, KERAS, FUNCTION = "TorchTrainer", "TFTrainer", "function"
EARLY_STOPPING, CHECKPOINTING = "EarlyStopping", "Checkpointing"
PLACES = (TORCH, KERAS, EARLY_STOPPING, CHECKPOINTING)
"""Names of the classes with advice of their own. `FUNCTION` stands for all trainers of training functions."""

METHOD, OPERATOR = "method", "operator"
_IN_FUNCTION = "write it in the function, as in a program for one process"
_CALLBACK = "callback"


def callback_instead_of(callback: object) -> str:
    """Return one or two sentences about what to use instead of another library's callback, with a leading space.

    Return an empty string for all other objects.

    Examples:
        >>> EarlyStopping = type("EarlyStopping", (), {"__module__": "lightning.pytorch.callbacks"})
        >>> callback_instead_of(EarlyStopping())
        ' Write `raysgd.callbacks.EarlyStopping("val_loss")`.'
    """
    kind = callback if isinstance(callback, type) else type(callback)
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if not libraries & {"keras", "tf_keras", "lightning", "pytorch_lightning", "transformers", "accelerate"}:
        return ""
    ours = next((ours for base in kind.__mro__ if (ours := _advice(base.__name__, _CALLBACK))), None)
    line = f" Write `raysgd.callbacks.{ours}`." if ours else ""
    if libraries & {"keras", "tf_keras"}:
        line += ' Keras\'s own belong to the `fit` of Keras: `config={"fit_config": {"callbacks": [...]}}`.'
    return line or " Write what it does in a subclass of one of these, such as in `on_result(self, run, result)`."


def instead_of(name: str, place: str) -> str | None:
    """Return advice on what to write instead of another library's option. Return None for unknown options.

    The advice completes a sentence in an error message.

    Args:
        name: Name of the option.
        place: Where the option was passed: `TORCH`, `KERAS`, `FUNCTION`, `EARLY_STOPPING` or `CHECKPOINTING`.
            `METHOD` if it is a method of an operator. `OPERATOR` if it is the class of an object that
            was passed as the operator, and the advice is then a sentence.

    Examples:
        >>> instead_of("gradient_clip_val", TORCH)
        'pass `clip_grad_norm=1.0` to the trainer'
        >>> instead_of("save_top_k", CHECKPOINTING), instead_of("banana", TORCH)
        ('write `metric="val_loss", keep_best=3`', None)
    """
    line = _advice(name, place)
    if line is None and place in (KERAS, FUNCTION) and (of_torch := _advice(name, TORCH)) is not None:
        return _IN_FUNCTION if place == FUNCTION else of_torch
    return line


def _advice(name: str, key: str) -> str | None:
    rows = read_table(__file__).items()
    return next((row[key] for names, row in rows if key in row and name in names.split()), None)
