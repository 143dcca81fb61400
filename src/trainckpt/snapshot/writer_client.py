"""Hand a shard file in shared memory to the rank's writer process (`writer_process`).

If that process cannot start or has died, the rank writes the file itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed, TierUnavailable
from trainckpt.format import digest, shard_file
from trainckpt.format.manifest import FileEntry
from trainckpt.snapshot import writer_process
from trainckpt.storage.direct_io import address
from trainckpt.storage.local import Disk, LocalTier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.format.names import SnapshotName
    from trainckpt.format.shard_file import ShardHeader
    from trainckpt.snapshot.encrypted_writer import SnapshotKey
    from trainckpt.snapshot.shard_writer import InMemory
    from trainckpt.storage.base import Tier

FROM_BYTES = 64 << 20  # a smaller file is written sooner than the process could start on it
END_WITHIN_S = 5.0
# Bytes copied between two progress reports: the smaller of this many, and this part of the file.
TELL_BYTES, TELL_PART = 32 << 20, 8
_MODULE = "trainckpt.snapshot.writer_process"

logger = logging.getLogger("trainckpt")


class WriterDied(Exception):
    """The writer process does not exist, or has died."""


class WriterClient:
    """The rank's side. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._starting = threading.Lock()
        self._can = hasattr(socket, "send_fds") and os.name == "posix"
        self._layout: ShardHeader | None = None  # last sent to the process

    def takes(self, tier: Tier | None, num_bytes: int) -> bool:
        """Return True if the process should write such a file; `tier` None: only to memory."""
        plain = tier is None or (isinstance(tier, LocalTier) and type(tier.disk) is Disk)
        return self._can and plain and num_bytes >= FROM_BYTES

    def start(self) -> None:
        """Start the process unless it runs; best called ahead of its use. Any thread."""
        with self._starting:
            if self._process is None and self._can:
                ours, theirs = socket.socketpair()
                try:
                    self._process = _launched(theirs.fileno())
                    self._end = ours
                except (OSError, ValueError, TypeError) as error:  # no interpreter found
                    ours.close()
                    self._give_up(str(error))
                finally:
                    theirs.close()

    def write(
        self,
        tier: Tier | None,
        name: SnapshotName,
        rank: int,
        shard: InMemory,
        *,
        descriptor: int,
        copied: Iterable[int],
        snapshot_key: SnapshotKey | None = None,
        into: tuple[int, int] | None = None,
    ) -> tuple[FileEntry, ShardHeader]:
        """Write as `write_shard`; the head is in the shard's memory too on return.

        Args:
            tier, name, rank, shard, copied, snapshot_key: As there.
            descriptor: Of the memory file behind `shard`.
            into: Descriptor and length of memory to keep the encrypted file in.

        Returns:
            The file's entry, and its header with one digest a region (`digest.compact`).

        Raises:
            WriterDied: the file was not written; `copied` may be partly consumed.
            SaveFailed, TierUnavailable: as there.
        """
        self.start()
        end = self._end
        if end is None:
            raise WriterDied
        header = shard.header
        body: dict[str, Any] = {
            "root": tier and tier.url,
            "name": str(name),
            "rank": rank,
            "num_bytes": len(shard.memory),
            "seal": snapshot_key and [snapshot_key.run, snapshot_key.key.hex()],
            "into": into[1] if into is not None else 0,
        }
        try:
            layout = b"" if header is self._layout else shard_file.build(header)
            self._layout = None  # after a failure the process may not have read it
            writer_process.send(end, body, layout, descriptor)
            if into is not None:
                writer_process.send(end, {}, descriptor=into[0])
            self._tell(end, shard.memory, copied)
            known = [(n, shard.digests.get(r.key)) for n, r in enumerate(header.regions)]
            numbers = [number for number, digests in known if digests]
            found = "".join(digests for _, digests in known if digests)
            writer_process.send(end, {"complete": True, "digested": numbers}, found.encode())
            reply = self._reply(end, shard.memory[: header.header_bytes])
        except (EOFError, OSError) as error:
            self.close()
            self._give_up(str(error) or "the process has ended")
            raise WriterDied from error
        for line in reply["said"]:
            logger.debug("%s", line)
        if "error" in reply:
            kind = TierUnavailable if reply["kind"] == "unavailable" else SaveFailed
            number = reply["errno"]
            cause = OSError(number, os.strerror(number)) if number else None
            raise kind(reply["error"], hint=reply["hint"]) from cause
        self._layout = header
        found, each = reply["digests"], digest.NUM_HEX
        digests = {
            region.key: found[number * each : (number + 1) * each]
            for number, region in enumerate(header.regions)
        }
        return FileEntry.from_json(reply["file"]), shard_file.with_digests(header, digests)

    def _tell(self, end: socket.socket, memory: memoryview, copied: Iterable[int]) -> None:
        begin, sent = address(memory) or 0, 0
        step = min(TELL_BYTES, len(memory) // TELL_PART)
        try:
            for behind in copied:
                if behind - begin - sent >= step:
                    sent = behind - begin
                    writer_process.send(end, {"behind": sent})
        except BaseException:
            with contextlib.suppress(EOFError, OSError):  # the next file reports the failure
                writer_process.send(end, {"abandon": True})
                self._reply(end, memoryview(b""))
            raise

    @staticmethod
    def _reply(end: socket.socket, head: memoryview) -> dict[str, Any]:
        reply = writer_process.receive(end)
        writer_process.receive_into(end, head[: reply.payload_bytes])
        return reply.body

    def close(self) -> None:
        """End the process and start no other; its unfinished writes count for nothing."""
        with self._starting:
            self._can = False
            process, self._process = self._process, None
            if self._end is not None:
                self._end.close()
                self._end = None
            self._layout = None
        if process is not None:
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_WITHIN_S)

    def rest(self) -> None:
        """End the process until the next use. No file may be in progress."""
        could = self._can
        self.close()
        self._can = could

    def _give_up(self, why: str) -> None:
        self._can = False
        logger.warning(
            "the writer process failed (%s): the rank writes its files itself, slowing training",
            why,
        )


def _launched(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process outside the rank's process group (no signals from it) and output."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TRAINCKPT_")}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(descriptor)],
        env=variables,
        pass_fds=(descriptor,),
        start_new_session=True,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
