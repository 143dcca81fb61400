"""Exchange messages between a rank and its writer process.

    8 bytes     length of the JSON, little-endian; may carry a file descriptor
    JSON        an object; `payload` is the number of bytes after it
    payload

They pass over a socket pair private to the two processes.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, NamedTuple

PREFIX_BYTES = 8
MOST_BYTES = 64 << 20  # of the JSON


class Message(NamedTuple):
    """A received message, without its payload (see `receive_into`)."""

    body: dict[str, Any]
    descriptor: int | None

    @property
    def payload_bytes(self) -> int:
        """Return the length of the payload, to be read before the next message."""
        return int(self.body.get("payload", 0))


def send(
    to: socket.socket,
    body: dict[str, Any],
    payload: bytes | memoryview = b"",
    descriptor: int | None = None,
) -> None:
    """Send a message; return when all of it is handed to the system.

    Raises:
        OSError: the other end is gone.
    """
    text = json.dumps({**body, "payload": len(payload)}).encode()
    prefix = len(text).to_bytes(PREFIX_BYTES, "little")
    if descriptor is None:
        to.sendall(prefix + text)
    else:
        sent = socket.send_fds(to, [prefix], [descriptor])
        to.sendall(prefix[sent:] + text)
    if len(payload):
        to.sendall(payload)


def receive(end: socket.socket) -> Message:
    """Return the next message.

    Raises:
        EOFError: the other end is gone.
    """
    prefix, descriptors, _, _ = socket.recv_fds(end, PREFIX_BYTES, 1)
    descriptor = descriptors[0] if descriptors else None
    try:
        rest = bytearray(PREFIX_BYTES - len(prefix))
        receive_into(end, memoryview(rest))
        length = int.from_bytes(prefix + rest, "little")
        text = bytearray(min(length, MOST_BYTES))
        receive_into(end, memoryview(text))
        body = json.loads(text)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    return Message(body, descriptor)


def receive_into(end: socket.socket, into: memoryview) -> None:
    """Fill `into`.

    Raises:
        EOFError: the other end is gone.
    """
    at = 0
    while at < len(into):
        got = end.recv_into(into[at:])
        if not got:
            raise EOFError
        at += got
