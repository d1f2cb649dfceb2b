"""Processes that no group knows."""

from __future__ import annotations

import socket

from raysgd.connections.mesh import meeting
from raysgd.connections.mesh.meeting import Address


def connect_to(address: Address) -> socket.socket:
    """A connection to where a rank listens."""
    connection = meeting._socket_for(address)
    connection.settimeout(20)
    connection.connect(meeting._name_of(address))
    return connection
