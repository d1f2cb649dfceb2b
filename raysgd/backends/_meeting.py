"""A meeting of all ranks at which each says one thing and hears what all said. Needs nothing but sockets."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

_POLL_S = 0.05
_GREETING_S = 10.0


class MeetingFailed(ConnectionError):
    """Another rank failed, or took too long, before all had come."""


class Meeting:
    """One meeting: rank 0 opens it, and every rank calls `exchange` once.

    Args:
        timeout_s: How long to wait for the others.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None
        self._is_interrupted = False

    def open(self) -> int:
        """On rank 0: begins to listen, and returns the port."""
        self._listener = socket.create_server(("", 0))
        self._listener.settimeout(_POLL_S)
        return int(self._listener.getsockname()[1])

    def interrupt(self) -> None:
        """From another thread: ends the wait for the others."""
        self._is_interrupted = True

    def close(self) -> None:
        """Stops listening."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def exchange(self, address: str, port: int, rank: int, size: int, word: str) -> list[str]:
        """Says `word`; returns what each rank said, by rank.

        Args:
            address: Where rank 0 is.
            port: What `open` returned there.
            rank: Who speaks.
            size: How many there are.
            word: What to say.

        Raises:
            MeetingFailed: Another rank did not come, or is gone.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            if self._listener is not None:
                return self._receive(self._listener, size, word, deadline)
            return self._visit(address, port, rank, word, deadline)
        except OSError as error:
            if isinstance(error, MeetingFailed):
                raise
            raise MeetingFailed(f"rank {rank} could not meet the others at {address}:{port}: {error}") from error

    def _receive(self, listener: socket.socket, size: int, word: str, deadline: float) -> list[str]:
        words = {0: word}
        with ExitStack() as stack:
            guests = []
            while len(words) < size:
                self._check(deadline)
                try:
                    guest, _ = listener.accept()
                except TimeoutError:
                    continue
                stack.enter_context(guest)
                greeting = self._greeting(guest)
                if greeting is not None:
                    words[greeting[0]] = greeting[1]
                    guests.append(guest)
            answer = json.dumps([words[rank] for rank in range(size)]).encode() + b"\n"
            for guest in guests:
                guest.sendall(answer)
        return [words[rank] for rank in range(size)]

    def _greeting(self, guest: socket.socket) -> tuple[int, str] | None:
        """What a guest says of itself; None for one that came by mistake."""
        guest.settimeout(_GREETING_S)
        try:
            with guest.makefile("rb") as lines:
                rank, word = json.loads(lines.readline(1 << 16))
        except (OSError, ValueError, TypeError):
            return None
        return (rank, word) if isinstance(rank, int) and isinstance(word, str) else None

    def _visit(self, address: str, port: int, rank: int, word: str, deadline: float) -> list[str]:
        with socket.create_connection((address, port), timeout=self._timeout_s) as host:
            host.sendall(json.dumps([rank, word]).encode() + b"\n")
            host.settimeout(_POLL_S)
            answer = b""
            while not answer.endswith(b"\n"):
                self._check(deadline)
                try:
                    part = host.recv(1 << 16)
                except TimeoutError:
                    continue
                if not part:
                    raise MeetingFailed("rank 0 left before all ranks had come")
                answer += part
        return [str(said) for said in json.loads(answer)]

    def _check(self, deadline: float) -> None:
        if self._is_interrupted or time.monotonic() > deadline:
            raise MeetingFailed("another rank failed, or took too long, before it joined the group")
