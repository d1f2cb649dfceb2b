"""Processes that no group knows."""

from __future__ import annotations

import socket

from raysgd.connections import _peers
from raysgd.connections._peers import Address


def connect_to(address: Address) -> socket.socket:
    """A connection to where a rank listens."""
    connection = _peers._socket_for(address)
    connection.settimeout(20)
    connection.connect(_peers._name_of(address))
    return connection
