"""`HuggingFaceOperator`: trains models of Hugging Face's `transformers`, with or without PEFT adapters."""

from __future__ import annotations

import inspect
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from raysgd.operators import options
from raysgd.operators.loaders import Collator
from raysgd.operators.packing import IGNORED
from raysgd.operators.supervised import SupervisedOperator
from raysgd.torch import TrainingOperator
from raysgd.torch.building_blocks import call_model, own_loss, split_batch
from raysgd.utils import BATCH_WEIGHT

if TYPE_CHECKING:
    from raysgd.torch import TorchTrainer

logger = logging.getLogger(__name__)

SHIFT_LABELS = "shift_labels"
"""Key in a batch for labels that the collator has already shifted by one token."""

POSITIONS = "position_ids"
"""Key in a packed batch for each token's position within its text."""

ADAPTER = "adapter_model.safetensors"
"""File name under which PEFT saves an adapter."""

_BATCH_SIZE = 'write `"batch_size"`; with `split_batches=True` it counts all workers'
_PRECISION = 'pass `precision="bf16"`, or "fp16", to the trainer'
_ARGUMENTS = {
    "learning_rate": ("build_optimizer", 'write `"lr"`'),
    "optim": ("build_optimizer", 'write `"optimizer"`'),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), ("build_optimizer", "override `build_optimizer`")),
    "lr_scheduler_type": ("build_scheduler", 'write `"scheduler"`'),
    "lr_scheduler_kwargs": ("build_scheduler", "override `build_scheduler`"),
    "warmup_steps": ("build_scheduler", 'write `"num_warmup_steps"`'),
    "warmup_ratio": ("build_scheduler", 'write the number of steps as `"num_warmup_steps"`'),
    "max_steps": (
        "build_scheduler",
        'write `"num_training_steps"`, and call `trainer.fit(max_steps=...)`',
    ),
    "label_smoothing_factor": ("forward", "override `forward`"),
    "num_train_epochs": ("", "`trainer.fit(5)` trains 5 epochs"),
    "gradient_accumulation_steps": ("", "pass `accumulate_grad_batches=4` to the trainer"),
    "per_device_train_batch_size": ("", _BATCH_SIZE),
    "per_device_eval_batch_size": ("", 'omit it: the `"batch_size"` is that of the validation, too'),
    "max_grad_norm": ("", "pass `clip_grad_norm=1.0` to the trainer"),
    "fp16": ("", _PRECISION),
    "bf16": ("", _PRECISION),
    "gradient_checkpointing": ("", "pass `activation_checkpointing=True` to the trainer"),
}
"""Names from `transformers.TrainingArguments` that are rejected as config keys.

For each name, a pair: the method that would use the key, or "" if there is none, and what to write instead. The key is
accepted if the operator overrides this method, because the override may read the key.
"""


class HuggingFaceOperator(SupervisedOperator):
    """Trains a `transformers` model with the model's built-in loss. You provide the model, the data and a collator.

    Override `build_model`, `build_data` and, unless PyTorch's `default_collate` can collate the samples,
    `build_collator`. A batch is a dict of tensors with the targets under `labels`, as `transformers` collators return
    it. If the model is a `PeftModel`, only its adapter is trained.

    The loss of a token-level model is the mean over the labels other than -100. Gradients and metrics are weighted by
    the number of these labels. A step on several workers therefore equals a single-process step on the global batch,
    even if text lengths differ between workers.

    `train` reports `train_loss`. `validate` reports `val_loss` and, if the labels are the classes of samples or tokens,
    `val_accuracy`.

    You can also override `build_optimizer`, `build_scheduler`, `count_labels`, `forward`, and any method of
    `TrainingOperator`. `setup` calls the `build_...` methods. If you override `setup`, call `super().setup(config)`.

    All config keys are optional, and you can add your own. Names from `transformers.TrainingArguments` that have an
    equivalent in raysgd raise a `ValueError` that names the equivalent.

    * `lr`: Learning rate. Default: 0.00005.
    * `optimizer`: "adamw" (the default), "adam", "rmsprop", "sgd", or a class that takes `lr` and `weight_decay`.
    * `weight_decay`: Weight decay. Default: 0. One-dimensional parameters and biases do not decay.
    * `scheduler`: Name of a schedule for `transformers.get_scheduler`, such as "linear". Also set `num_training_steps`,
      unless the schedule is constant, and, for a warm-up, `num_warmup_steps`. Needs
      `TorchTrainer(scheduler_step_freq="batch")`.
    * `batch_size`: Samples per step and worker. With `split_batches=True`, samples per step over all workers.
      Default: 32. To set the global batch size in either case, use the key `raysgd.utils.BATCH_SIZE` instead.
    * `seed`: Seed for PyTorch's generators, which determine the initial weights, the data order and all later random
      numbers.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from raysgd import TorchTrainer
        >>> class Parity(HuggingFaceOperator):
        ...     def build_model(self, config):
        ...         sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        ...         return BertForSequenceClassification(BertConfig(vocab_size=10, num_labels=2, **sizes))
        ...
        ...     def build_data(self, config):
        ...         data = [{"input_ids": torch.tensor([index % 10]), "labels": index % 2} for index in range(100)]
        ...         return data, data
        >>> options = {"config": {"lr": 0.01, "batch_size": 10, "seed": 0}, "split_batches": True}
        >>> with TorchTrainer(training_operator_cls=Parity, **options, use_local=True) as trainer:
        ...     for _ in range(5):
        ...         result = trainer.train()
        ...     trainer.validate()["val_accuracy"] > 0.9
        True

    Attributes:
        model: The registered model.
        optimizer: The model's optimizer.
        scheduler: The learning-rate scheduler, if there is one.
        ddp_args: Options for `DistributedDataParallel`. If the loss does not use all parameters of the model, set
            `{"find_unused_parameters": True}`.
    """

    _default_lr = 5e-5
    _default_optimizer = "adamw"

    def _prepare_model(self, model: torch.nn.Module) -> None:
        """Cast the trainable half-precision parameters to fp32 if training is in mixed precision.

        Do nothing if the model has no frozen parameters.
        """
        parameters = [*model.parameters()]
        if self._raysgd.precision.is_mixed and not all(each.requires_grad for each in parameters):
            for each in parameters:
                if each.requires_grad and each.dtype in (torch.bfloat16, torch.float16):
                    each.data = each.data.float()

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor] | None:
        """Return None, because the model computes the loss. Override `forward` to use another loss."""
        return None

    def _collators(self, config: dict[str, Any]) -> tuple[Collator | None, Collator | None]:
        own = self.build_collator(config)
        collated = partial(_collated, own or default_collate)
        return collated, None if own is None else collated

    def build_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        """Create the learning-rate schedule named by `config["scheduler"]`. Return None if the key is missing.

        Raises:
            ValueError: The trainer has `scheduler_step_freq="epoch"`, or a number of steps is invalid.
        """
        if config.get("scheduler") is None:
            return None
        if self.scheduler_step_freq == "epoch":
            raise ValueError(
                f"`config['scheduler']={config['scheduler']!r}` counts optimizer steps: pass "
                '`TorchTrainer(scheduler_step_freq="batch")`, or override `build_scheduler`.'
            )
        from transformers import get_scheduler

        num_steps = config.get("num_training_steps")
        if num_steps is not None:
            num_steps = options.count(config, "num_training_steps", default=None)
        num_warmup_steps = options.number(config, "num_warmup_steps", default=0, positive=False)
        if 0 < num_warmup_steps < 1:
            share = f"{num_warmup_steps:g}"
            here = f", here {math.ceil(num_warmup_steps * num_steps)}" if num_steps else ""
            raise ValueError(
                f"`config['num_warmup_steps']={share}`: need a number of steps, not a fraction of all steps. Write "
                f"`math.ceil({share} * num_training_steps)`{here}."
            )
        return get_scheduler(config["scheduler"], optimizer, int(num_warmup_steps), num_steps)

    def setup(self, config: dict[str, Any]) -> None:
        """Build and register model, optimizer and data. If you override this, call `super().setup(config)`.

        Raises:
            ValueError: A config value is invalid, or a config key is an option of `transformers.TrainingArguments`.
            TypeError: A `build_...` method returned an object of the wrong type.
        """
        for name, (method, advice) in _ARGUMENTS.items():
            is_overridden = method and getattr(type(self), method) is not getattr(HuggingFaceOperator, method)
            if name in config and not is_overridden:
                raise ValueError(f"`config[{name!r}]` is for `transformers.TrainingArguments`: {advice}.")
        super().setup(config)
        model = self._original_models[0]
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # the model inside a `PeftModel`
        self._shifts_labels = _shifts_labels(model)
        arguments = inspect.signature(type(model).forward).parameters
        self._label_names = [name for name in arguments if "label" in name]
        self._keeps_cache = "use_cache" in arguments
        self._recomputes = self._raysgd.context.settings.step_options.activation_checkpointing
        self._model_config: Any = getattr(model, "config", None)
        if model is not self._original_models[0] and self.world_rank == 0 and not _says_who_makes_it(type(self)):
            frozen = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
            logger.warning(
                "each snapshot and checkpoint, and the state that a new worker gets, includes the frozen base of the "
                "adapter, %.3g MB. If `build_model` creates the same base on every worker and in every run, as from a "
                "file, write `excludes_frozen_from_state = True` in `%s`, otherwise "
                "`excludes_frozen_from_state = False`",
                frozen / 1e6,
                type(self).__name__,
            )

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """Move a batch to the device.

        Returns:
            `(inputs, labels)`. The only input is the batch, on the device. The labels, which are compared with the
            predictions, stay on the device where the collator created them, because counting labels on a GPU would
            force a synchronization. If the loss compares each prediction with the next token, the labels are
            shifted by one token. Without labels in the batch, the second item is None.

        Raises:
            TypeError: The batch is not a dict.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"A batch is a `{type(batch).__name__}`: return a dict from `build_collator`, as the collators of "
                "`transformers` do, or override `prepare_batch` and `forward`."
            )
        features, _ = super().prepare_batch(batch)
        labels = split_batch(batch)[1]
        if SHIFT_LABELS in batch:
            return features, batch[SHIFT_LABELS]
        return features, labels[..., 1:] if self._shifts_labels and labels is not None else labels

    def count_labels(self, target: Any) -> int | None:
        """Return the number of labels over which a batch's loss averages, or None if the loss averages over samples.

        By default, labels of -100 do not count. For images, the ignored label is taken from the model's configuration.
        Override this for a model whose loss ignores other labels.

        Args:
            target: The labels, as `prepare_batch` returns them.

        Raises:
            ValueError: The model has a CTC loss that is not a mean.
        """
        if not isinstance(target, torch.Tensor) or target.is_floating_point():
            return None
        config, ignored = self._model_config, IGNORED
        if target.ndim == 2 and hasattr(config, "ctc_loss_reduction"):
            if config.ctc_loss_reduction != "mean":
                raise ValueError(
                    f"`ctc_loss_reduction={config.ctc_loss_reduction!r}`: several workers need a loss that is a mean. "
                    "Set `model.config.ctc_loss_reduction = 'mean'`."
                )
            return None
        if target.ndim == 3:
            if getattr(config, "num_labels", None) == 1:  # the loss averages over all pixels; ignored pixels count as 0
                return None
            ignored = getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", IGNORED))
        return int(target.ne(ignored).sum())

    def forward(self, features: Sequence[Any], target: Any) -> tuple[Any, ...]:
        """Return the model's output, its loss, and what `count_labels` returns.

        Raises:
            TypeError: The model returned no loss, or failed because the samples contain strings.
            ValueError: The batch has several label arguments, so the loss is a sum of means over different labels.
        """
        name = type(self._original_models[0]).__name__
        # Disable the KV cache. Blocks recomputed by activation checkpointing would fill it twice, and with the cache,
        # packed texts would attend to each other.
        if self._keeps_cache and (self._recomputes or POSITIONS in features[0]):
            features = ({**features[0], "use_cache": False}, *features[1:])
        labels = [each for each in self._label_names if features[0].get(each) is not None]
        if len(labels) > 1:
            raise ValueError(
                f"`{name}` adds up means over {', '.join(map(repr, labels))}, whose counts differ between workers. "
                "Override `forward`: return the output, a loss that is a mean over one count, and that count."
            )
        with _saying_texts(features, AttributeError, TypeError, ValueError):  # the errors that strings can cause
            output = call_model(self.model, features)
        loss = own_loss(output)
        if loss is None:
            raise TypeError(
                f"`{name}` returned no loss for a batch with {', '.join(map(repr, features[0]))}: add `labels` to the "
                "samples, use a model with a head, leave `return_dict` at True, or override `forward`."
            )
        return output, loss, self.count_labels(target)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch. Return `val_loss`, and `val_accuracy` if the labels are classes of samples or tokens."""
        output, target, metrics = self.evaluate_batch(batch)
        share = _accuracy(output, target) if BATCH_WEIGHT in metrics else None
        shares = {} if share is None else {"val_accuracy": share}
        return {**metrics, **shares, **self.measure_batch(output, target)}

    @staticmethod
    def save_pretrained(trainer: TorchTrainer, folder: str | Path, *parts: Any) -> Path:
        """Save the trainer's model to a folder for `from_pretrained`. For a `PeftModel`, save the adapter only.

        Args:
            trainer: A trainer of a `HuggingFaceOperator`.
            folder: Folder on the driver's machine. It is created if necessary.
            parts: Other objects to save there with their `save_pretrained` method, such as the tokenizer.

        Returns:
            The path of the folder.
        """
        path = Path(folder)
        adapter = next((each for each in trainer.apply_all_operators(_adapter_files) if each), None)
        if adapter is None:
            parts = (trainer.get_model(to_cpu=True), *parts)
        else:
            _write(adapter, path)
        for part in parts:
            part.save_pretrained(path)
        return path

    @staticmethod
    def load_pretrained(trainer: TorchTrainer, folder: str | Path) -> None:
        """Load a saved adapter into the models of all workers.

        The adapter can come from `save_pretrained` of this class or of PEFT.

        Args:
            trainer: A trainer of a `HuggingFaceOperator` with a `PeftModel`.
            folder: The adapter's folder on the driver's machine.

        Raises:
            FileNotFoundError: The folder does not contain an adapter.
            ValueError: The adapter does not fit the model, or the model is sharded or not a `PeftModel`.
        """
        from safetensors.torch import load_file

        trainer.apply_all_operators(partial(_load_adapter, weights=load_file(Path(folder, ADAPTER))))

    def _parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """Return the trainable parameters in two groups, with and without weight decay."""
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if not trained:
            raise ValueError(
                "The model that `build_model` returned has no parameter with `requires_grad`. To train a saved adapter "
                "further, load it with `PeftModel.from_pretrained(base, folder, is_trainable=True)`."
            )
        decaying = [each for name, each in trained.items() if each.ndim > 1 and "bias" not in name]
        others = [each for name, each in trained.items() if each.ndim <= 1 or "bias" in name]
        return [{"params": decaying}, {"params": others, "weight_decay": 0.0}]


def _says_who_makes_it(operator_cls: type) -> bool:
    names = {"excludes_frozen_from_state", "remakes_frozen"}  # the second name is the former one
    return any(names & vars(each).keys() for each in operator_cls.__mro__ if each is not TrainingOperator)


def _adapter_files(operator: HuggingFaceOperator) -> dict[str, bytes] | None:
    """Return the adapter's files on rank 0.

    Return None on other ranks, and if the model is sharded or has no adapter.
    """
    model: Any = operator._raysgd.registered.original_models[0]
    if operator.world_rank or operator._raysgd.parallel.is_sharded or not hasattr(model, "get_base_model"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = [each for each in Path(folder).rglob("*") if each.is_file()]
        return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _load_adapter(operator: HuggingFaceOperator, weights: dict[str, torch.Tensor]) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model: Any = operator._raysgd.registered.original_models[0]
    if operator._raysgd.parallel.is_sharded or not hasattr(model, "get_base_model"):
        raise ValueError(
            f"The model is a `{type(model).__name__}`, but adapters need a whole `PeftModel`: return one from "
            "`build_model`."
        )
    own = get_peft_model_state_dict(model)
    shapes = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown or shapes:
        raise ValueError(
            "The adapter does not match the model, so nothing was loaded. "
            f"Missing: {missing or 'nothing'}; unknown: {unknown or 'nothing'}; other shapes: {shapes or 'none'}. Make "
            "the model with the same `LoraConfig`."
        )
    set_peft_model_state_dict(model, weights)


def _collated(collator: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    with _saying_texts(samples, Exception):
        return collator(samples)


@contextmanager
def _saying_texts(parts: Sequence[Any], *errors: type[Exception]) -> Iterator[None]:
    """If the block fails because the samples contain strings, raise an error that says to tokenize the strings.

    Args:
        parts: Samples, or a batch's inputs. Only the first sample or input is checked for strings.
        errors: Exception types that strings may cause. Other exceptions pass through unchanged.
    """
    try:
        yield
    except errors as error:
        first = parts[0] if parts and isinstance(parts[0], Mapping) else {}
        texts = [name for name, value in first.items() if _is_text(value)]
        if not texts:
            raise
        encode = f"`dataset.map(lambda row: tokenizer(row[{texts[0]!r}], truncation=True), remove_columns={texts!r})`"
        raise TypeError(
            f"The samples have texts under {', '.join(map(repr, texts))}, but models accept only numbers. Encode the "
            f"texts in `build_data` and remove them: {encode}; or let `build_collator` do that. ({error})"
        ) from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str))


def _shifts_labels(model: Any) -> bool:
    """Return True if the loss compares the prediction at each token with the label of the next token.

    The name of the model's class does not show this: some language models use the shifted loss of `transformers`, and
    others compute their own loss from unshifted labels.
    """
    own = [vars(each)["forward"] for each in type(model).__mro__ if "forward" in vars(each)]
    forwards = [inspect.unwrap(each) for each in own]
    if not any("loss_function" in each.__code__.co_names for each in forwards if hasattr(each, "__code__")):
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_function", None) is ForCausalLMLoss and not is_encoder_decoder


def _accuracy(logits: Any, target: torch.Tensor) -> torch.Tensor | None:
    """Return the fraction of labels, other than -100, that the highest logit predicts correctly.

    Return None if there are no logits per class, or if the labels form an image.
    """
    is_scores = isinstance(logits, torch.Tensor) and logits.ndim == target.ndim + 1 and logits.shape[-1] > 1
    if not is_scores or target.ndim > 2:
        return None
    target = target.to(logits.device)
    chosen = logits[..., : target.shape[-1], :].argmax(-1) if target.ndim > 1 else logits.argmax(-1)
    return (chosen == target).sum().double() / target.ne(IGNORED).sum()
