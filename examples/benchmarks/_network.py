"""Nodes on this machine with a slow network between them: network namespaces, and a process that forwards packets.

Linux only. Needs root and the command `ip`, but neither `tc` nor a second machine. Python forwards the packets, about
50 MB/s on its own core, so this can measure the effects of delay and loss, but hardly of bandwidth.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

DEVICE = "t0"
"""The network device of each node, as `GLOO_SOCKET_IFNAME` takes it."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_NET = "10.99.0"
_MTU = 1500
_MOST_AT_ONCE = 64  # packets of one node, before packets of other nodes are handled


@dataclass(frozen=True)
class Node:
    """One node: a network namespace.

    Attributes:
        host: Its address.
        namespace: The descriptor of its namespace.
    """

    host: str
    namespace: int

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Make sockets that this thread opens, and processes that it starts, belong to the node."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _call("setns", self.namespace, _CLONE_NEWNET)
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
            os.close(home)


def can_make_nodes() -> bool:
    """Return whether this process may create namespaces and network devices."""
    try:
        with network(1, 0.0):
            return True
    except OSError:
        return False


@contextmanager
def network(num_nodes: int, delay_s: float, loss: float = 0.0) -> Iterator[list[Node]]:
    """Create nodes that can reach each other. They exist until the block and all processes in them have ended.

    Args:
        num_nodes: Number of nodes.
        delay_s: Delay of each packet; a message and its answer take twice as long.
        loss: Fraction of packets that are lost.

    Raises:
        OSError: This process may not make them.
    """
    nodes, devices = [], []
    try:
        for index in range(num_nodes):
            host = f"{_NET}.{index + 1}"
            namespace, device = _new_namespace(host)
            nodes.append(Node(host, namespace))
            devices.append(device)
        fork = multiprocessing.get_context("fork")
        switch = fork.Process(target=_pass_on, args=(devices, delay_s, loss), daemon=True)
        switch.start()
        try:
            yield nodes
        finally:
            switch.kill()
            switch.join()
    finally:
        for number in (*devices, *(node.namespace for node in nodes)):
            os.close(number)


def _new_namespace(host: str) -> tuple[int, int]:
    """Create a namespace with this address; return its descriptor, and the descriptor of its packet source."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _call("unshare", _CLONE_NEWNET)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI, b""))
        for arguments in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{host}/24", "dev", DEVICE],
            ["link", "set", DEVICE, "mtu", str(_MTU), "txqueuelen", "10000", "up"],
            # The Linux default: other schedulers, which this machine may use, pause for 200 ms every ten seconds.
            ["route", "change", f"{_NET}.0/24", "dev", DEVICE, "src", host, "congctl", "cubic"],
        ):
            subprocess.run(["ip", *arguments], check=True)
    finally:
        _call("setns", home, _CLONE_NEWNET)
        os.close(home)
    return namespace, device


def _pass_on(devices: Sequence[int], delay_s: float, loss: float) -> None:
    """Forward packets between the nodes, each after the delay, until this process is killed."""
    generator, poll = random.Random(1), select.poll()
    under_way: list[tuple[float, int, int, bytes]] = []  # arrival time, number, target, packet
    for device in devices:
        poll.register(device, select.POLLIN)
    num_packets = 0
    while True:
        wait_s = under_way[0][0] - time.monotonic() if under_way else 1.0
        ready = poll.poll(int(max(0.0, wait_s) * 1000))  # the last part of a millisecond is spent polling
        for device, _ in ready:
            for packet in _packets_of(device):
                target = packet[19] - 1  # the last byte of the target address
                if 0 <= target < len(devices) and generator.random() >= loss:
                    num_packets += 1
                    heapq.heappush(under_way, (time.monotonic() + delay_s, num_packets, devices[target], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, device, packet = heapq.heappop(under_way)
            with suppress(BlockingIOError):  # the buffer of the node is full: the packet is lost
                os.write(device, packet)


def _packets_of(device: int) -> Iterator[bytes]:
    """Return the IPv4 packets that are available now."""
    for _ in range(_MOST_AT_ONCE):
        try:
            packet = os.read(device, 65536)
        except BlockingIOError:
            return
        if len(packet) >= 20 and packet[0] >> 4 == 4:
            yield packet


def _call(name: str, *arguments: int) -> None:
    if getattr(_C, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


_C = ctypes.CDLL(None, use_errno=True)
