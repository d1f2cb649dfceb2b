"""The Ray session of this process, and the threads of the user's program that call Ray.

The library calls Ray in the background only in a `RayThread`. Such a thread belongs to the session in which its work
began: it never starts Ray, its owner waits for it when the owner ends, and if the user ends Ray first, its work raises
an error. ADR 172 explains why.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from raysgd.core.private_names import find_name
from raysgd.exceptions import RaySGDError, WorkersLostError

T = TypeVar("T")

_END_S = 10.0


def session() -> Any:
    """Return an object that identifies this process's Ray session, or None if the process is not connected to Ray.

    This function never starts Ray.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    if ray.util.client.ray.is_connected():
        return ray.util.client.ray.get_context().client_worker
    try:
        context = ray.get_runtime_context()
        return context.worker.node.session_name, context.get_job_id()
    except Exception:  # another thread has just ended Ray
        return None


@contextmanager
def in_session(expected: Any) -> Iterator[None]:
    """Run a `with` block that needs the Ray session `expected`, the result of an earlier call to `session`.

    Raises:
        WorkersLostError: The session ended before or during the block. Ray itself would raise `SystemExit(0)`.
    """
    cause: BaseException | None = None
    if expected is None or session() == expected:
        try:
            yield
            return
        except (Exception, SystemExit) as error:
            if expected is None or isinstance(error, RaySGDError) or session() == expected:
                raise
            cause = error
    raise session_ended() from cause


def session_ended() -> WorkersLostError:
    """Return the error to raise if the Ray session of a background call has ended."""
    return WorkersLostError("The Ray session of this call has ended, for instance by `ray.shutdown()`.")


@contextmanager
def delaying_shutdown() -> Iterator[None]:
    """Run a `with` block that `ray.shutdown()` in another thread waits for.

    If Ray is shut down while another thread writes to the object store or reads from it, Ray ends the process.
    """
    with find_name("ray._private.worker:_connect_or_shutdown_lock") or nullcontext():
        yield


class RayThread(threading.Thread):
    """A thread in which the library calls Ray. It never starts Ray."""


def is_ray_thread() -> bool:
    """Return True if this code runs in a `RayThread`."""
    return isinstance(threading.current_thread(), RayThread)


class _MayStartRay:
    """A value of Ray's switch `enable_auto_connect`: false in a `RayThread`, and unchanged in other threads."""

    def __init__(self, elsewhere: object) -> None:
        self._elsewhere = elsewhere

    def __bool__(self) -> bool:
        return bool(self._elsewhere) and not is_ray_thread()


def keep_threads_from_starting_ray() -> None:
    """Let calls to Ray in a `RayThread` raise an error where Ray is not running, instead of starting it.

    Call this function after Ray is imported.
    """
    auto_init = find_name("ray._private:auto_init_hook")
    if hasattr(auto_init, "enable_auto_connect"):
        auto_init.enable_auto_connect = _MayStartRay(auto_init.enable_auto_connect)


class RayThreads:
    """Starts the threads of an owner, such as a trainer, and waits for them when the owner ends."""

    def __init__(self) -> None:
        self._threads: list[RayThread] = []

    def start(self, work: Callable[[], T], name: str) -> Future[T]:
        """Run `work` in a new thread, in the current Ray session. Return a future with its result or error.

        Args:
            work: The function to run.
            name: Name of the thread, with the prefix "raysgd-".
        """
        started_in, future = session(), Future[T]()

        def run() -> T:
            with in_session(started_in):
                return work()

        thread = RayThread(target=run_into, args=(future, run), name=name, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return future

    def join(self) -> None:
        """Wait for the threads to finish, at most 10 s for all of them together. Skip the current thread.

        First interrupt or stop what they do.
        """
        until = time.monotonic() + _END_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` and store its result or exception in `future`. Threads use this function as their target."""
    try:
        result = work()
    except BaseException as error:  # even KeyboardInterrupt, which the caller of `future.result` should get
        future.set_exception(error)
    else:
        future.set_result(result)
