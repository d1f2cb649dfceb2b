"""`DatasetConfig`: the treatment of each dataset of a run, by a trainer's configs with those of a user over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from raysgd.air.constants import WILDCARD_KEY

_GIB = 1 << 30


@dataclass
class DatasetConfig:
    """The treatment of one dataset. None leaves a field to the trainer's own config, and then to its default.

    Attributes:
        fit: Whether the preprocessor is fit on it. Default: False; of `train`, True.
        split: Whether each worker gets a part of it, or all of it. Default: False; of `train`, True.
        required: Whether it has to be given. Default: False.
        transform: Whether the preprocessor is applied to it. Default: True.
        use_stream_api: Whether its blocks are read while training goes on. Default: False.
        stream_window_size: How many bytes are read ahead then. Default: 1 GiB.
        global_shuffle: Whether all its rows are shuffled before each epoch. Default: False.
        randomize_block_order: Whether its blocks come in another order in each epoch. Default: True.
    """

    fit: bool | None = None
    split: bool | None = None
    required: bool | None = None
    transform: bool | None = None
    use_stream_api: bool | None = None
    stream_window_size: float | None = None
    global_shuffle: bool | None = None
    randomize_block_order: bool | None = None

    def fill_defaults(self) -> DatasetConfig:
        """A config without None."""
        return _DATASET_DEFAULTS.updated(self)

    def updated(self, other: DatasetConfig) -> DatasetConfig:
        """A config in which the fields that `other` sets have its values."""
        given = {each.name: getattr(other, each.name) for each in fields(DatasetConfig)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @staticmethod
    def merge(a: Mapping[str, DatasetConfig], b: Mapping[str, DatasetConfig] | None) -> dict[str, DatasetConfig]:
        """The configs of a trainer, `a`, with those of a user, `b`, over them, field by field.

        Raises:
            ValueError: `b` names a dataset that `a` does not know, and has no "*" for; or is no dict of configs.
        """
        merged = dict(a)
        if b is not None and not isinstance(b, Mapping):
            raise ValueError(f"`dataset_config={b!r}`: need a dict of names and `DatasetConfig`s.")
        for name, config in (b or {}).items():
            if not isinstance(config, DatasetConfig):
                raise ValueError(f"`dataset_config[{name!r}]={config!r}`: need a `DatasetConfig`.")
            before = a.get(name, a.get(WILDCARD_KEY))
            if before is None:
                raise ValueError(f"`dataset_config` names {name!r}: this trainer knows {sorted(a)}.")
            merged[name] = before.updated(config)
        return merged

    @staticmethod
    def validated(config: Mapping[str, DatasetConfig], datasets: Mapping[str, Any]) -> dict[str, DatasetConfig]:
        """The configs with their defaults, once it is clear that they fit the datasets.

        Raises:
            ValueError: They do not.
        """
        filled = {name: each.fill_defaults() for name, each in config.items()}
        fit = [name for name, each in filled.items() if each.fit]
        if len(fit) > 1:
            raise ValueError(
                f"`dataset_config` has `fit=True` for {sorted(fit)}: a preprocessor is fit on one dataset."
            )
        if fit and not filled[fit[0]].transform:
            raise ValueError(
                f"`dataset_config[{fit[0]!r}]` has `fit=True` and `transform=False`: leave one of them out."
            )
        missing = [name for name, each in filled.items() if each.required and name not in (WILDCARD_KEY, *datasets)]
        if missing:
            raise ValueError(f"`datasets` lacks {sorted(missing)}, which `dataset_config` requires.")
        unknown = [] if WILDCARD_KEY in filled else sorted(set(datasets) - set(filled))
        if unknown:
            raise ValueError(
                f"`datasets` has {unknown}, of which `dataset_config` says nothing: it has {sorted(filled)}."
            )
        return filled


_DATASET_DEFAULTS = DatasetConfig(False, False, False, True, False, _GIB, False, True)
