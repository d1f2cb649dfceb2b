"""`HTMLReport`: a run as one HTML file that needs nothing else, written again after every epoch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd._files.atomic_file import replacing
from raysgd._files.paths import check_path
from raysgd._text.secrets import masked
from raysgd._version import __version__
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.page import RunFacts, page_of
from raysgd.writers.failing import FailureWarnings

if TYPE_CHECKING:
    from raysgd.engine.shared.group_events import GroupEvent

_PACKAGES = ("ray", "torch", "tensorflow", "keras", "lightning", "transformers", "numpy")
_OPTIONS = ("backend", "max_replicas", "use_gpu", "precision", "parallel", "recovery", "min_workers", "spare_workers")
_NAMES_OF_OPTIONS = {"max_replicas": "num_workers"}
_LONG_S, _SHARE = 0.05, 50  # a report that takes longer to write than this may take a fiftieth of the time
_LONGEST_VALUE = 300
_MOST_ENTRIES = 500


class HTMLReport(Callback):
    """Writes a report of the run: curves, throughput, where the time went, losses and resizes, results, configuration.

    The file is complete whenever you open it, and needs no network. While the run goes on, the page refreshes itself.
    If writing takes long, because the run has very many short epochs, some are skipped; the last one never is.
    Keys and passwords in the config are `***`: entries with such names, and those in URIs.

    Args:
        path: The file; None means `report.html` in the folder of the run.

    Raises:
        TypeError, ValueError: `path` is no path, or a URI.

    Examples:
        >>> trainer.fit(10, callbacks=[HTMLReport()])  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None:
            check_path("path", path)
        self._given = Path(path).expanduser().absolute() if path is not None else None
        self._failures = FailureWarnings(type(self).__name__)
        self._rest_until = 0.0

    def on_run_begin(self, run: Run) -> None:
        self._write(run, "running")

    def on_event(self, run: Run, event: GroupEvent) -> None:
        self._write(run, "running")

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        if time.monotonic() >= self._rest_until:
            self._write(run, "running")

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if error is not None:
            self._write(run, "failed", masked(f"{type(error).__name__}: {error}"))
        elif run.history.stop_reason is not None:
            self._write(run, "stopped", run.history.stop_reason)
        else:
            self._write(run, "finished")

    def path(self, run: Run) -> Path:
        """Return where the report of a run is."""
        return self._given if self._given is not None else run.folder / "report.html"

    def _write(self, run: Run, state: str, reason: str = "") -> None:
        with self._failures.instead():
            self._write_page(run, state, reason)

    def _write_page(self, run: Run, state: str, reason: str) -> None:
        began, path = time.monotonic(), self.path(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        page = page_of(facts_of(run, state, reason), run.history)
        with replacing(str(path)) as file:
            file.write(page.encode("utf-8", errors="replace"))
        took = time.monotonic() - began
        self._rest_until = began + took * _SHARE if took > _LONG_S else 0.0


def facts_of(run: Run, state: str, reason: str = "") -> RunFacts:
    """Return what there is to tell of a run besides its history."""
    return RunFacts(
        name=str(run.name),
        state=state,
        reason=reason,
        epoch=run.epoch,
        epochs=run.epochs,
        started_at=run.started_at,
        written_at=time.time(),
        trainer=_options_of(run.trainer),
        config=dict(_flat(masked(run.config))),
        versions=_versions(),
        ledger={} if run.trainer is None else run.trainer.ledger().total(),
    )


def _options_of(trainer: Any) -> dict[str, str]:
    if trainer is None:
        return {}
    operator = getattr(trainer, "training_operator_cls", None)
    told = {"trainer": type(trainer).__name__, "operator": getattr(operator, "__qualname__", "")}
    told |= {_NAMES_OF_OPTIONS.get(name, name): str(getattr(trainer, name, "")) for name in _OPTIONS}
    return {name: value for name, value in told.items() if value not in ("", "None")}


def _flat(config: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The entries of a config and of the dicts in it, with dots between their names."""
    for number, (key, value) in enumerate(config.items()):
        name = f"{above}{key}"
        if number >= _MOST_ENTRIES:
            yield f"{above}...", f"{len(config) - number} more"
            return
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, _shortened(value)


def _shortened(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # a value of the user: its `repr` must not end the run
        text = f"a {type(value).__name__} that cannot be shown: {type(error).__name__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text):,} characters)"


def _versions() -> dict[str, str]:
    """Of what is imported already: nothing is imported for this."""
    found = {"raysgd": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            found[package] = _version_of(package)
    return {**found, "system": platform.platform(), "host": platform.node()}


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[package], "__version__", "unknown"))
