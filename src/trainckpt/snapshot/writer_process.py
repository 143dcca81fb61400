"""Digest and write a rank's shard files in a process beside the rank. Imports no torch.

    python -m trainckpt.snapshot.writer_process DESCRIPTOR

In the rank's own process, each Python call that digests or writes would take the interpreter from
training, which launches thousands of operations a step. This process takes only a free core.

It reads the arena in place and never writes to it: the head is sent back to the rank. So after the
rank's death the arena's next owner has no other writer. Its files count only once the ranks commit,
and memory it encrypts to has no name before that.

It ignores signals, and ends when its rank does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import SaveFailed, TierUnavailable, TrainckptError
from trainckpt.format import digest, shard_file
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.encrypted_writer import SnapshotKey
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.storage.direct_io import address, private_memory
from trainckpt.storage.local import LocalTier
from trainckpt.storage.store_errors import number_behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.shard_file import ShardHeader


# ---- messages between a rank and its writer process
#
#     8 bytes     length of the JSON, little-endian; may carry a file descriptor
#     JSON        an object; `payload` is the number of bytes after it
#     payload
#
# They pass over a socket pair private to the two processes.


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


# ---- the process


_DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT")
NICENESS = 5  # training goes first if no core is free
SWITCH_S = 0.0002  # a thread that submits disk writes must not wait 5 ms for a digesting one
MAPPED = 4  # mappings to cache: a rank's arenas, and memory for encrypted files


class Abandoned(SaveFailed):
    """The rank gave the file up."""


@dataclass
class KnownDigests:
    """Numbers of regions digested by the rank, and their digests, concatenated."""

    numbers: list[int] = field(default_factory=list)
    digests: str = ""


class MappedShardFile:
    """A shard file in the rank's memory; a `shard_writer.InMemory`."""

    def __init__(self, header: ShardHeader, data: memoryview, known: KnownDigests) -> None:
        """`known`: digests from the rank; complete as soon as the file is."""
        self.header, self.memory, self._known = header, data, known
        self.top = private_memory(header.header_bytes)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Return the digests the rank made while copying, by region key."""
        at, found = 0, {}
        for number in self._known.numbers:
            region = self.header.regions[number]
            end = at + region.num_blocks * digest.NUM_HEX
            found[region.key], at = self._known.digests[at:end], end
        return found

    @cached_property
    def head(self) -> bytes:
        """Return the file's first bytes; digests the missing regions first."""
        first = self.header.header_bytes
        self.header = shard_file.with_digests(
            self.header,
            {
                r.key: self.digests.get(r.key)
                or digest.digests_by_block(
                    self.memory[first + r.first_byte : first + r.first_byte + r.num_bytes],
                    shard_file.block_bytes(r.num_bytes),
                )
                for r in self.header.regions
            },
        )
        found = shard_file.build(self.header)
        self.top[:] = found
        return found


class WriteProcess:
    """Server for one rank."""

    def __init__(self, end: socket.socket, messages: list[str]) -> None:
        self._end, self._messages = end, messages
        self._tiers: dict[str, LocalTier] = {}
        self._mapped: dict[tuple[int, int, int], mmap.mmap] = {}
        self._header: ShardHeader | None = None
        self._digested = KnownDigests()  # of the file under way

    def serve(self) -> None:
        """Write one file after the other until the rank is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                asked = receive(self._end)
                layout = bytearray(asked.payload_bytes)
                receive_into(self._end, memoryview(layout))
                self._answer(asked, bytes(layout))

    def _answer(self, asked: Message, layout: bytes) -> None:
        progress = self._progress()
        self._messages.clear()
        self._digested = KnownDigests()
        try:
            body, payload = self._write(asked, layout, progress)
        except EOFError:
            raise
        except Exception as error:  # noqa: BLE001 - the rank handles the error
            with contextlib.suppress(Abandoned):
                deque(progress, 0)  # drain the rank's messages about this file
            body, payload = _error_message(error), memoryview(b"")
        send(self._end, {**body, "said": list(self._messages)}, payload)

    def _write(
        self, asked: Message, layout: bytes, progress: Iterator[int]
    ) -> tuple[dict[str, Any], memoryview]:
        body = asked.body
        behind = receive(self._end) if body["into"] else None
        if layout:  # first: it holds for later files too, even if this one fails
            self._header = shard_file.parse(
                layout, "a message of a rank", file_bytes=body["num_bytes"]
            )
        data = self._take(asked, body["num_bytes"])
        into = self._take(behind, body["into"]) if behind is not None else None
        assert self._header is not None
        name, rank = SnapshotName.parse(body["name"]), body["rank"]
        assert name is not None
        shard, begin = MappedShardFile(self._header, data, self._digested), address(data) or 0
        copied = (begin + behind for behind in progress)
        snapshot_key = (
            SnapshotKey(body["seal"][0], bytes.fromhex(body["seal"][1])) if body["seal"] else None
        )
        root = body["root"]
        tier = self._tiers.setdefault(root, LocalTier(root)) if root is not None else None
        file = write_shard(
            tier, name, rank, shard, copied=copied, snapshot_key=snapshot_key, into=into
        )
        found = "".join(digest.compact(shard.header.digests_of(r)) for r in shard.header.regions)
        return {"file": file.to_json(), "digests": found}, shard.top

    def _progress(self) -> Iterator[int]:
        """Yield the number of complete bytes at the file's start, as the rank reports it.

        Raises:
            Abandoned: the rank gave the file up.
        """
        while True:
            message = receive(self._end)
            if message.body.get("abandon"):
                raise Abandoned("abandoned")
            if message.body.get("complete"):
                digests = bytearray(message.payload_bytes)
                receive_into(self._end, memoryview(digests))
                self._digested.numbers = message.body["digested"]
                self._digested.digests = digests.decode("ascii")
                return
            yield message.body["behind"]

    def _take(self, message: Message, num_bytes: int) -> memoryview:
        assert message.descriptor is not None
        try:
            return self._map(message.descriptor, num_bytes)
        finally:
            os.close(message.descriptor)

    def _map(self, descriptor: int, num_bytes: int) -> memoryview:
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino, status.st_size
        found = self._mapped.pop(key, None)
        if found is None:
            found = mmap.mmap(descriptor, status.st_size)
        self._mapped[key] = found  # reinserted last: most recently used
        for old in list(self._mapped)[:-MAPPED]:
            del self._mapped[old]
        return memoryview(found)[:num_bytes]


def _error_message(error: Exception) -> dict[str, Any]:
    kind = "unavailable" if isinstance(error, TierUnavailable) else "failed"
    facts = {"kind": kind, "errno": number_behind(error)}
    if isinstance(error, TrainckptError):
        return {"error": error.message, "hint": error.hint, **facts}
    return {"error": f"{type(error).__name__}: {error}", "hint": "", **facts}


class _LogBuffer(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(arguments: list[str]) -> int:
    """Serve the rank at the other end of this descriptor."""
    for name in _DEAF_TO:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    sys.setswitchinterval(SWITCH_S)
    kept = _LogBuffer()
    logger = logging.getLogger("trainckpt")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(kept)
    with socket.socket(fileno=int(arguments[0])) as end:
        WriteProcess(end, kept.messages).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
