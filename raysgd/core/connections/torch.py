"""Connects PyTorch workers: forms `torch.distributed` process groups with gloo or NCCL, and aborts them on failures.

With gloo, the workers are also connected by a mesh: sockets between all pairs of ranks, over which small collectives
are faster. With either backend, they share a board: a key-value store without a server.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysgd.core.cluster.resources import MULTI_RANK, DriverView, why_ranks_cannot_share
from raysgd.core.connections._compiler import defer_compiler
from raysgd.core.connections._gloo import DelayedCalls, GlooConnections, as_written, open_sockets, opened_since
from raysgd.core.connections._origins import is_of, with_causes
from raysgd.core.connections.group import Group
from raysgd.core.connections.mesh.board import Board, neighbors, others
from raysgd.core.connections.mesh.meeting import ConnectFailed, ListeningConnection, listen_at
from raysgd.core.connections.mesh.mesh import Mesh, MeshBroken
from raysgd.core.engine.shared.types import Rendezvous, World
from raysgd.core.memory import keep_freed_memory

logger = logging.getLogger(__name__)

_SETTLE_S = 0.002
_ABORT_S = 60.0
_FORM_BESIDE_S = 6.0  # timeout for forming additional gloo groups; short, because all ranks have just communicated
_STORE = "raysgd/store"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_FOR_WORKERS = (MULTI_RANK, "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS")
"""Environment variables of the driver that workers need to run several ranks of NCCL on one GPU."""

# Lower-case phrases in the error messages of gloo and NCCL if another rank is gone. PyTorch passes on such an error as
# a plain `RuntimeError`.
_BROKEN = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "wait timeout",
    "nccl error",
    "nccl communicator was aborted",
    "gloo/transport",
    "failed to recv",
    "failed to send",
    "application timeout caused pair closure",
)
# Lower-case phrases in NCCL's error messages about a mistake of the user, such as two ranks on one GPU.
_MISTAKES = ("invalid usage", "duplicate gpu detected", "ranks are using the same gpu")


@dataclass
class TorchConnection(ListeningConnection):
    """Forms PyTorch's default process group over all ranks, unless there is only one rank.

    Attributes:
        transport: "gloo" or "nccl".
        joins_alone: True to form a group even for a single rank, because other ranks may join later.
        variables: Environment variables for NCCL, which are set in each worker unless it has them.
    """

    transport: str = "gloo"
    joins_alone: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._former: list[DelayedCalls] = []
        self._gpus_of_driver: tuple[str, ...] = ()

    def _forget_group(self) -> None:
        super()._forget_group()
        self._board: Board | None = None
        self._store: Any = None  # keeps the store alive, because PyTorch's C++ code calls its Python methods
        self._gloo: GlooConnections | None = None
        self._mesh: Mesh | None = None
        self._group: Group | None = None
        self._aborting: threading.Thread | None = None
        self._is_cut = self._is_formed = self._has_joined = False
        self._beside: list[Any] = []

    def load(self) -> None:
        self.load_in_driver()
        defer_compiler()
        keep_freed_memory()

    def load_in_driver(self) -> None:
        import torch.distributed  # noqa: F401

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:
        """Make PyTorch use this worker's first GPU.

        Select the GPU by its ordinal in this process. CUDA may already have read `CUDA_VISIBLE_DEVICES`, so changing
        that variable would have no effect.

        Raises:
            RuntimeError: This process cannot see the GPU.
        """
        import torch

        self._gpus_of_driver = tuple(gpu_ids)
        if gpu_ids and torch.cuda.is_available():
            torch.cuda.set_device(ordinal_of(gpu_ids[0], os.environ.get("CUDA_VISIBLE_DEVICES")))

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Form PyTorch's default process group over all ranks.

        Do nothing for a single rank, unless `even_alone` or `joins_alone` is True.

        Raises:
            RuntimeError: Other code in this process has already formed a default process group.
        """
        if not (world.is_distributed or even_alone or self.joins_alone):
            return
        import torch.distributed as dist

        if dist.is_initialized():
            raise RuntimeError(
                "`torch.distributed` is already initialized in this process. A trainer with `use_local=True` needs the "
                "default process group of the driver for itself: destroy the other group or shut the other trainer "
                "down."
            )
        self._choose_interface(rendezvous)
        self._store = store = self._connect(rendezvous, world)
        self._has_joined, self._is_cut = True, False
        # The timeout of collectives. It must be set here, because gloo cannot change it after the group has formed.
        timeout = datetime.timedelta(seconds=self.timeout_s)
        dist.init_process_group(self.transport, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        if self.transport == "gloo" and world.is_distributed:
            store.longest_wait_s = math.inf  # the limit was for forming the group; later waits may take longer
            assert self._mesh is not None
            assert self._gloo is not None
            self._mesh.timeout_s = self.timeout_s
            self._check_forming()  # raise if this rank was interrupted before the connections existed
            self._gloo.look()
        self._is_formed = True
        global _joined
        _joined = self

    def _connect(self, rendezvous: Rendezvous, world: World) -> Any:
        """Connect to the other ranks.

        Return the `torch.distributed` store through which the process group will form.
        """
        if not world.is_distributed:
            return _c10d("HashStore")()
        lanes = [neighbors(world.rank, world.size)]
        if self.transport == "gloo":
            lanes.append(others(world.rank, world.size))
        on_board, *in_mesh = self._meet(rendezvous, world, *lanes)
        self._board = Board(world.rank, world.size, on_board)
        self._parts = [self._board]
        self._gloo = GlooConnections(self._board)
        if self.transport == "gloo":
            from raysgd.core.connections.mesh.store import BoardStore

            self._mesh = Mesh(in_mesh[0], self._form_timeout_s)
            self._group = Group(world, self._mesh, rendezvous.hosts)
            self._parts = [self._mesh, self._board]
            return BoardStore(self._board, self._form_timeout_s)
        self._see_gpus_of_node(world)
        return self._store_of_rank_0(rendezvous.address, world, self._board)

    def _store_of_rank_0(self, host: str, world: World, board: Board) -> Any:
        """Return a `TCPStore` hosted by rank 0, for NCCL.

        With NCCL, a store implemented in Python is unsafe, because NCCL's threads would call it while the process
        exits.
        """
        options = {"wait_for_workers": False, "timeout": datetime.timedelta(seconds=self._form_timeout_s)}
        if world.rank == 0:
            with listen_at(host) as listener:
                port = listener.getsockname()[1]
                store = _c10d("TCPStore")(host, port, is_master=True, master_listen_fd=listener.detach(), **options)
            board.put(_STORE, str(port).encode())
            return store
        port = int(board.get(_STORE, self._form_timeout_s))
        return _c10d("TCPStore")(host, port, is_master=False, **options)

    def _exchange(self, topic: str, word: bytes) -> list[bytes]:
        """Send a byte string to all ranks over the board. Return every rank's string. See `Board.exchange`."""
        assert self._board is not None
        return self._board.exchange(topic, word, self._form_timeout_s)

    def _see_gpus_of_node(self, world: World) -> None:
        """Make the GPUs of every worker on this node visible to this worker, and select this worker's own GPU.

        If each worker saw only its own GPU, workers could not access each other's GPU memory, and NCCL would be slow or
        fail. Nothing changes in this worker if it is the driver, or if CUDA has already read `CUDA_VISIBLE_DEVICES`.
        The worker then only sends the IDs of its GPUs to the other ranks.

        Raises:
            ValueError: Ranks share a GPU, and the loaded NCCL does not support this on every rank. All ranks raise.
        """
        import torch

        own, assigned = os.environ.get(_VISIBLE, ""), self._gpus_of_driver or world.gpu_ids
        obstacle = why_ranks_cannot_share(os.environ.get(MULTI_RANK), loaded_nccl())
        word = json.dumps([world.node_rank, ",".join(self._gpus_of_driver) or own, assigned[:1], obstacle])
        by_rank = [json.loads(each) for each in self._exchange("raysgd/gpus", word.encode())]
        num_ranks = Counter((node_rank, gpu_id) for node_rank, _, gpu_ids, _ in by_rank for gpu_id in gpu_ids)
        for rank, (node_rank, _, gpu_ids, obstacle) in enumerate(by_rank):
            if obstacle and any(num_ranks[node_rank, gpu_id] > 1 for gpu_id in gpu_ids):
                raise ValueError(
                    f"rank {rank} shares GPU {gpu_ids[0]} with another rank: {obstacle} Or connect the workers over "
                    'gloo, with `backend="gloo"`, or ask for a GPU for each worker.'
                )
        if self._gpus_of_driver:
            return
        visible, ordinal = visible_to_all(own, [each[1] for each in by_rank if each[0] == world.node_rank])
        if visible == own or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        os.environ[_VISIBLE] = visible
        try:
            torch.cuda.set_device(ordinal)
        except RuntimeError as error:
            logger.warning("this worker sees only its own GPU, because CUDA was already in use: %s", error)
            os.environ[_VISIBLE] = own
            torch.cuda.set_device(0)

    def new_group_beside(self, form_timeout_s: float | None = None) -> Any:
        """Form a gloo group over all ranks in addition to the default group. All ranks must call this method.

        `interrupt` also aborts waits in the new group.

        Args:
            form_timeout_s: The new group's timeout. If a rank dies while the group forms, the other ranks wait this
                long. Default: PyTorch's own default (30 minutes), even if the default group has another timeout.
        """
        import torch.distributed as dist

        if self._group is not None:
            self._group.add_up(np.zeros(1))  # a barrier: waits for all ranks, or raises if a rank is gone
        before = open_sockets() if self.transport != "gloo" else {}
        if self._gloo is not None:
            self._gloo.found = None  # makes `cut` search again, so that it also shuts down the new group's sockets
        timeout_s = self.timeout_s if form_timeout_s is None else form_timeout_s
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._beside.append(group)
        if self._gloo is not None:
            # With NCCL, gloo wrote its addresses to the `TCPStore`, so also write them to the board.
            if self.transport != "gloo":
                listening = map(as_written, opened_since(before)[1])
                self._exchange(f"raysgd/listens/{len(self._beside)}", b"".join(listening))
            self._gloo.look()
        if self._is_cut:  # another thread has interrupted the group in the meantime
            self.interrupt()
        return group

    def interrupt(self) -> None:
        self._is_interrupted = self._is_cut = True  # before gloo's sockets are cut, so that `join` does not succeed
        try:
            if self._gloo is not None:
                self._gloo.cut()
        finally:
            super().interrupt()
        if self.transport == "nccl" and self._has_joined and self._aborting is None:
            self._aborting = threading.Thread(target=_abort_process_group, name="raysgd-abort", daemon=True)
            self._aborting.start()  # in a thread, because aborting may take long and this thread answers heartbeats

    def give_up(self, error: BaseException) -> None:
        """After a connection error, shut down the mesh and the board, so that all other ranks notice the failure.

        Also shut down gloo's sockets, unless the error came from the mesh of a formed group. ADR 55 explains why. With
        NCCL, also abort the process group.
        """
        is_in_mesh = self.transport == "gloo" and any(isinstance(link, MeshBroken) for link in with_causes(error))
        if self._is_formed and is_in_mesh:
            super().interrupt()
        else:
            self.interrupt()

    def wait_for_collectives(self) -> None:
        """With NCCL, wait until the GPU has completed the collectives that this rank has started.

        NCCL only puts a collective into the GPU's queue. If a rank is lost, the GPU waits in the collective until the
        group is aborted. Then the GPU runs what is queued behind it, such as an optimizer step, on incomplete sums. So
        call this method before you queue work that must not happen then (ADR 175).

        If another rank is lost, or if the collectives take longer than `timeout_s`, this method aborts the group.

        Raises:
            DistNetworkError: The group was aborted, so the results of the collectives may be incomplete.
        """
        board = self._board
        if self.transport != "nccl" or board is None:
            return
        import torch

        make_event: Any = torch.cuda.Event
        queued = make_event()
        queued.record()
        deadline = time.monotonic() + self.timeout_s
        while not queued.query():
            if not self._is_cut and (board.is_broken or time.monotonic() > deadline):
                self.interrupt()
            time.sleep(0)
        if self._is_cut:
            raise torch.distributed.DistNetworkError("the NCCL group was aborted while this rank waited for its sums")

    @property
    def is_broken(self) -> bool:
        """True if a connection to another rank is known to have ended. Some connections are not monitored."""
        is_mesh_broken = self._mesh is not None and self._mesh.is_broken
        is_gloo_broken = self._gloo is not None and not self._gloo.are_open
        return self._is_cut or is_mesh_broken or is_gloo_broken

    def leave_for_another(self) -> None:
        """Leave the group in order to join another group.

        Unless the group was interrupted, shut down gloo's connections only after a delay. ADR 55 explains why.
        """
        import torch.distributed as dist

        if self.transport == "gloo" and self._is_formed and not self._is_cut:
            self._former = [each for each in self._former if not each.has_ended]
            self._former.append(self._end_later([dist.group.WORLD, *self._beside]))
        self._leave()

    def _end_later(self, groups: list[Any]) -> DelayedCalls:
        """Shut down gloo's connections after a delay. Release the process groups after another delay."""

        def let_go() -> None:
            time.sleep(_SETTLE_S)  # see `end_process_group`
            groups.clear()

        gloo, self._gloo = self._gloo, None
        if gloo is None:
            return DelayedCalls(let_go)
        return DelayedCalls(gloo.cut, let_go)

    def leave(self) -> None:
        self._leave()
        while self._former:
            self._former.pop().hurry()

    def _leave(self) -> None:
        global _joined
        if _joined is self:
            _joined = None
        self.interrupt()
        if self._aborting is not None:
            self._aborting.join(_ABORT_S)
            # Raise an error. This process still answers heartbeats, so the other ranks would otherwise wait forever.
            if self._aborting.is_alive():
                raise ConnectFailed(f"NCCL did not end its connections within {_ABORT_S:g} s: this process is stuck")
        if self._has_joined:  # do not destroy a group that other code formed
            end_process_group()
        super().leave()

    def is_connection_error(self, error: BaseException) -> bool:
        return is_connection_error(error)

    def _choose_interface(self, rendezvous: Rendezvous) -> None:
        """Make gloo use the loopback interface if all ranks are on one node, and make NCCL's waits blocking.

        Environment variables that the user has set stay unchanged.
        """
        has_loopback = rendezvous.on_one_node and os.path.exists("/sys/class/net/lo")
        variables = {"GLOO_SOCKET_IFNAME": "lo"} if has_loopback else {}
        if self.transport == "nccl":
            variables |= {"NCCL_BLOCKING_WAIT": "1", **self.variables}
        self._set_variables({name: value for name, value in variables.items() if name not in os.environ})


_joined: TorchConnection | None = None  # the connection that formed this process's default group


def mesh_group() -> Group | None:
    """Return the collectives over the mesh, or None if this process has no mesh, as with NCCL.

    For small arrays, these collectives are faster than gloo's.
    """
    return None if _joined is None else _joined._group


def new_group_beside() -> Any:
    """Form a gloo group over all ranks in addition to the default group. All ranks must call this function."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo") if _joined is None else _joined.new_group_beside()


def summation_beside() -> Callable[[Any], Any]:
    """Return a function that starts an asynchronous, in-place sum of a tensor over all ranks.

    That function returns PyTorch's `Work` object. The sums run in a separate gloo group. All ranks must call both this
    function and the returned function.
    """
    import torch.distributed as dist

    if _joined is None:
        group = dist.new_group(backend="gloo")
        return lambda numbers: dist.all_reduce(numbers, group=group, async_op=True)
    group, options = _joined.new_group_beside(_FORM_BESIDE_S), dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=_joined.timeout_s)
    return lambda numbers: group.allreduce([numbers], options)


def board_of_group() -> Board:
    """Return the board of the group that this process joined: the key-value store that all ranks share."""
    assert _joined is not None, "no group was joined"
    assert _joined._board is not None, "a rank that is alone has no other rank to write to"
    return _joined._board


def is_group_broken() -> bool:
    """Return True if the default group that a `TorchConnection` formed is known to have lost a connection."""
    return _joined is not None and _joined.is_broken


def wait_for_collectives() -> None:
    """Wait until the collectives of this process are complete, and raise if one has failed.

    Waits only with NCCL. With gloo, a collective has ended when it returns.
    """
    if _joined is not None:
        _joined.wait_for_collectives()


def is_connection_error(error: BaseException) -> bool:
    """Return True if an exception from a collective means that the connections of the group are broken."""
    import torch.distributed as dist

    for link in with_causes(error):  # user code may have wrapped PyTorch's error in a `RuntimeError` that quotes it
        text = str(link).lower()
        if isinstance(link, RuntimeError) and any(phrase in text for phrase in _MISTAKES):
            return False
        if isinstance(link, dist.DistError | ConnectFailed | MeshBroken):
            return True
        if not (isinstance(link, RuntimeError) and any(phrase in text for phrase in _BROKEN)):
            return False
        if is_of(link, "torch", passing_on="torch._utils"):
            return True
    return False


def _c10d(name: str) -> Any:
    """Return a class of the module `torch.distributed` by name, because PyTorch's type stubs lack the class."""
    from torch import distributed

    return vars(distributed)[name]


def _abort_process_group() -> None:
    """Stop the collectives of a broken NCCL group on the GPU. Otherwise, their kernels would occupy the GPU forever."""
    import torch.distributed as dist

    group = dist.group.WORLD
    if dist.is_initialized() and hasattr(group, "abort"):
        group.abort()  # type: ignore[union-attr]


def end_process_group() -> None:
    """Leave PyTorch's default group. If forming the group failed, reset PyTorch's group counter.

    PyTorch numbers its groups, and ranks find each other by the group's number. If forming a group fails, some ranks
    have already counted the group and other ranks have not. Without the reset, these ranks would use different numbers
    for the next group, and wait for each other forever.
    """
    import torch.distributed as dist

    if not dist.is_initialized():  # form and leave a single-rank group, which resets the counter
        dist.init_process_group("gloo", store=_c10d("HashStore")(), rank=0, world_size=1)
    # PyTorch holds the GIL while it waits for the group's threads. A thread that is just finishing the last collective
    # may need the GIL to release a tensor, so give it some time.
    time.sleep(_SETTLE_S)
    try:
        dist.destroy_process_group()
    except RuntimeError as error:  # PyTorch raises this if the group is broken
        logger.debug("leaving a broken group: %s", error)


# ---------------------------------------------------------------------------------------------------------------- GPUs


def view_of_driver(environment: Mapping[str, str] | None = None) -> DriverView:
    """Return what PyTorch and NCCL in this process say about GPUs.

    Args:
        environment: Environment variables that the user has set for the workers besides those of this process.
    """
    import torch

    is_built = torch.cuda.is_available() or torch.version.cuda is not None or torch.version.hip is not None
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0 if is_built else None
    return DriverView(num_gpus, {**os.environ, **(environment or {})}.get(MULTI_RANK), loaded_nccl())


def variables_of_nccl() -> dict[str, str]:
    """Return the environment variables of this process that workers need to run several ranks of NCCL on one GPU."""
    return {name: os.environ[name] for name in _FOR_WORKERS if name in os.environ}


def loaded_nccl() -> int:
    """Return the version of the NCCL library in this process, such as 23007 for 2.30.7. Return 0 if it has none.

    `torch.cuda.nccl.version()` is the version with which PyTorch was built, but a program can load another one.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return 0
    version = ctypes.c_int()
    return version.value if library.ncclGetVersion(ctypes.byref(version)) == 0 else 0


# A GPU's ID is a number or a name such as `GPU-8932f937`. `CUDA_VISIBLE_DEVICES` lists the GPUs that a process sees.
# CUDA numbers these GPUs in the order of the list (their ordinals). If the variable is not set, the process sees all
# GPUs of the machine. ADR 55 explains why each worker sees the GPUs of all workers on its node.


def ordinal_of(gpu_id: str, visible: str | None) -> int:
    """Return the index that CUDA gives to a GPU (its ordinal) in a process with this `CUDA_VISIBLE_DEVICES`.

    Args:
        gpu_id: ID of the GPU.
        visible: The process's `CUDA_VISIBLE_DEVICES`. None if it is not set: the process then sees all GPUs, and the
            number of a GPU is its ordinal. An empty value is treated like None.

    Raises:
        RuntimeError: The process cannot see that GPU, or the ID is a name that `visible` does not list.

    Examples:
        >>> ordinal_of("3", visible="1,3"), ordinal_of("3", visible=None)
        (1, 3)
    """
    listed = _ids(visible)
    if not listed and gpu_id.isdigit():
        return int(gpu_id)
    if gpu_id not in listed:
        raise RuntimeError(
            f"GPU {gpu_id} is reserved for the worker in this process, which cannot see it: "
            f"`CUDA_VISIBLE_DEVICES={visible or ''}`. Start the process with {gpu_id} in that variable."
        )
    return listed.index(gpu_id)


def visible_to_all(own: str, of_node: Sequence[str]) -> tuple[str, int]:
    """Merge the `CUDA_VISIBLE_DEVICES` of all workers on a node.

    Return a pair: the merged list, and the ordinal of this worker's first GPU. If any of these variables is empty,
    return `own` and 0.

    Args:
        own: The worker's `CUDA_VISIBLE_DEVICES`.
        of_node: `CUDA_VISIBLE_DEVICES` of all workers on the node, by local rank.

    Examples:
        >>> visible_to_all("2", ["0", "2"])
        ('0,2', 1)
    """
    if not own or not all(of_node):
        return own, 0  # a worker's list is unset or empty: it sees all GPUs or none, so there is nothing to merge
    union = list(dict.fromkeys(identity for listed in of_node for identity in _ids(listed)))
    return ",".join(union), union.index(_ids(own)[0])


def _ids(listed: str | None) -> list[str]:
    return [identity.strip() for identity in (listed or "").split(",") if identity.strip()]
