"""Checks of what all class-based trainers accept. They refuse an argument before anything starts."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from raysgd.exceptions import InvalidCountError

logger = logging.getLogger(__name__)


def is_integer(value: Any) -> bool:
    """Whether it is a whole number, also one of numpy's, which search algorithms hand out."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any, hint: str) -> int:
    """Refuses anything but a positive integer, and returns it as Python's."""
    if not is_integer(value) or value <= 0:
        raise InvalidCountError(f"`{name}={value!r}`: need at least 1, as an integer. {hint}")
    return int(value)


def check_kinds(config: Any, initialization_hook: Any, num_cpus_per_worker: Any) -> None:
    """Refuses arguments of the wrong kind."""
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(
            f"`config={config!r}`: need a dict, which the operator's `setup`, or creator functions, are given."
        )
    if initialization_hook is not None and not callable(initialization_hook):
        raise TypeError(f"`initialization_hook={initialization_hook!r}`: need a function without parameters.")
    is_number = isinstance(num_cpus_per_worker, int | float) and not isinstance(num_cpus_per_worker, bool)
    if not is_number or num_cpus_per_worker < 0:
        raise ValueError(f"`num_cpus_per_worker={num_cpus_per_worker!r}`: need a number of CPUs, 0 or more.")


def check_num_steps(num_steps: Any) -> int | None:
    """Refuses anything but None or a count, and returns it as Python's."""
    if num_steps is None:
        return None
    if not is_integer(num_steps) or num_steps < 0:
        raise InvalidCountError(
            f"`num_steps={num_steps!r}`: need a number of batches per worker, or None for one pass."
        )
    return int(num_steps)


def check_info(info: Any) -> dict[str, Any]:
    """Refuses anything but None or a dict, and returns a copy."""
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"`info={info!r}`: need a dict, whose entries the operator is given with each batch.")
    return dict(info or {})


def refuse_unknown(trainer: str, unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses keywords that nobody knows, with a guess at what was meant."""
    for name in unknown:
        close = difflib.get_close_matches(name, [*known], n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise TypeError(f"`{trainer}` does not know `{name}`.{hint}")


def check_elastic(
    num_workers: int,
    *,
    recovery: Any,
    min_workers: Any,
    spare_workers: Any,
    resize_check_s: Any,
    snapshot_every_n_steps: Any,
    heartbeat_s: Any,
    settle_timeout_s: Any,
) -> None:
    """Checks what says how a trainer follows losses and gains of workers.

    Raises:
        ValueError: `recovery` is unknown or a time is not positive.
        InvalidCountError: A count is out of range.
    """
    if recovery not in ("rejoin", "rebuild"):
        raise ValueError(
            f'`recovery={recovery!r}`: allowed are "rejoin" (the survivors of a loss go on) and "rebuild" (all workers '
            "are started anew)."
        )
    check_count("min_workers", min_workers, hint="It is the number of workers to wait for after a loss.")
    if min_workers > num_workers:
        raise InvalidCountError(
            f"`min_workers={min_workers}` with `num_workers={num_workers}`: there are never more than `num_workers`. "
            "Lower the one or raise the other."
        )
    if not is_integer(spare_workers) or spare_workers < 0:
        raise InvalidCountError(f"`spare_workers={spare_workers!r}`: need 0 or more, as an integer.")
    if snapshot_every_n_steps is not None:
        check_count("snapshot_every_n_steps", snapshot_every_n_steps, hint="None copies the state between calls only.")
    times = {"resize_check_s": resize_check_s, "heartbeat_s": heartbeat_s, "settle_timeout_s": settle_timeout_s}
    for name, seconds in times.items():
        if seconds is None and name == "resize_check_s":
            continue
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"`{name}={seconds!r}`: need a number of seconds above 0.")


def check_max_retries(max_retries: Any) -> None:
    """Refuses anything but a count."""
    if not is_integer(max_retries) or max_retries < 0:
        raise InvalidCountError(f"`max_retries={max_retries!r}`: need 0 (fail at the first loss of a worker) or more.")


def warn_of_obstacle(obstacle: str | None, **options: Any) -> None:
    """Warns of options that say what happens inside an epoch, where an epoch can only be begun again.

    Args:
        obstacle: Why that is so; None where it is not.
        **options: The options, None where they were not given.
    """
    given = ", ".join(f"`{name}={value!r}`" for name, value in options.items() if value is not None)
    if obstacle is not None and given:
        logger.warning(
            "%s: no effect inside an epoch, because %s. After a loss the call is run again from its beginning, and "
            "growing waits for the next one; shorter calls (`num_steps`) lose less",
            given,
            obstacle,
        )
