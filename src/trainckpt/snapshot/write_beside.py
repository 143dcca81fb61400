"""Write beside: hand a shard file in shared memory to the process that writes it. See there.

If there can be no such process, or it is gone, the rank writes the file itself, as ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import SaveFailed, TierUnavailable
from trainckpt.format import digest, shard_file
from trainckpt.snapshot import messages
from trainckpt.snapshot.save import Receipt
from trainckpt.tiers.direct import address
from trainckpt.tiers.disk import Disk
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.format.names import SnapshotName
    from trainckpt.format.shard_file import ShardHeader
    from trainckpt.snapshot.save import InMemory
    from trainckpt.snapshot.save_sealed import Seal
    from trainckpt.tiers.base import Tier

FROM_BYTES = 64 << 20  # what is smaller is written before the other process has heard of it
END_WITHIN_S = 5.0
# The other process hears of so much that is copied at once, or of so large a part of the file.
TELL_BYTES, TELL_PART = 32 << 20, 8
_MODULE = "trainckpt.snapshot.write_process"

logger = logging.getLogger("trainckpt")


class Lost(Exception):
    """There is no such process, or not any more."""


class File(NamedTuple):
    """A shard file in shared memory, and where it goes: as `write_shard` takes it.

    Attributes:
        tier: None: it is written nowhere, but encrypted to `into`.
        descriptor: Of the file in memory that `shard` is.
        seal: It is encrypted.
        into: Where the encrypted file stays: the descriptor and the length of that memory.
    """

    tier: Tier | None
    name: SnapshotName
    rank: int
    shard: InMemory
    descriptor: int
    seal: Seal | None = None
    into: tuple[int, int] | None = None


class Written(NamedTuple):
    """A file on stable storage.

    Attributes:
        receipt: Of this rank.
        header: With one digest for each region (`digest.compact`).
    """

    receipt: Receipt
    header: ShardHeader


class WriteBeside:
    """This rank's side. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._starting = threading.Lock()
        self._can = hasattr(socket, "send_fds") and os.name == "posix"
        self._layout: ShardHeader | None = None  # that the process knows

    def takes(self, tier: Tier | None, num_bytes: int) -> bool:
        """Whether a file of this size is to be written there; None: nowhere but to memory."""
        plain = tier is None or (isinstance(tier, LocalTier) and type(tier.disk) is Disk)
        return self._can and plain and num_bytes >= FROM_BYTES

    def start(self) -> None:
        """Have the process; at best before it is needed. Any thread."""
        with self._starting:
            if self._process is None and self._can:
                ours, theirs = socket.socketpair()
                try:
                    self._process = _launched(theirs.fileno())
                    self._end = ours
                except (OSError, ValueError, TypeError) as error:  # no interpreter to be found
                    ours.close()
                    self._give_up(str(error))
                finally:
                    theirs.close()

    def write(self, file: File, copied: Iterable[int]) -> Written:
        """As `write_shard`; the head stands in the memory too when it returns.

        Raises:
            Lost: nothing was written by anybody; `copied` may have been begun.
            SaveFailed, TierUnavailable: as there.
        """
        self.start()
        end = self._end
        if end is None:
            raise Lost
        try:
            return self._write(end, file, copied)
        except (EOFError, OSError) as error:
            self.close()
            self._give_up(str(error) or "it has ended")
            raise Lost from error

    def _write(self, end: socket.socket, file: File, copied: Iterable[int]) -> Written:
        header, memory = file.shard.header, file.shard.memory
        layout = b"" if header is self._layout else shard_file.build(header)
        self._layout = None  # what fails may have failed before it was read there
        body: dict[str, Any] = {
            "root": file.tier and file.tier.url, "name": str(file.name), "rank": file.rank,
            "num_bytes": len(memory),
        }  # fmt: skip
        if file.seal is not None:
            body["seal"] = [file.seal.run, file.seal.key.hex()]
        body["into"] = 0 if file.into is None else file.into[1]
        messages.send(end, body, layout, file.descriptor)
        if file.into is not None:
            messages.send(end, {}, descriptor=file.into[0])
        self._tell(end, memory, copied)
        self._complete(end, file.shard)
        reply = self._reply(end, memory[: header.header_bytes])
        for line in reply["said"]:
            logger.info("%s", line)
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
        return Written(
            Receipt.from_json(reply["receipt"]), shard_file.with_digests(header, digests)
        )

    def _tell(self, end: socket.socket, memory: memoryview, copied: Iterable[int]) -> None:
        """Say how far the file is complete, until all of it is."""
        begin, told = address(memory) or 0, 0
        step = min(TELL_BYTES, len(memory) // TELL_PART)
        try:
            for behind in copied:
                if behind - begin - told >= step:
                    told = behind - begin
                    messages.send(end, {"behind": told})
        except BaseException:
            with contextlib.suppress(EOFError, OSError):  # then the next file finds out
                messages.send(end, {"abandon": True})
                self._reply(end, memoryview(b""))
            raise

    @staticmethod
    def _complete(end: socket.socket, shard: InMemory) -> None:
        """Say that the file is complete, and what is known of it already."""
        known = [(n, shard.digests.get(r.key)) for n, r in enumerate(shard.header.regions)]
        numbers = [number for number, found in known if found]
        found = "".join(each for _, each in known if each)
        messages.send(end, {"complete": True, "digested": numbers}, found.encode())

    @staticmethod
    def _reply(end: socket.socket, head: memoryview) -> dict[str, Any]:
        reply = messages.receive(end)
        messages.receive_into(end, head[: reply.payload_bytes])
        return reply.body

    def close(self) -> None:
        """The process ends, and none is begun; nothing it may still write means anything."""
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
        """The process ends until it is needed again. No file is under way."""
        could = self._can
        self.close()
        self._can = could

    def _give_up(self, why: str) -> None:
        self._can = False
        logger.warning("files are written by the ranks themselves from now on, which takes time "
                       "from training: no process can do it beside them (%s)", why)  # fmt: skip


def _launched(descriptor: int) -> subprocess.Popen[bytes]:
    """Apart from the rank's process group, whose signals are not for it, and from its output."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TRAINCKPT_")}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(descriptor)], env=variables, pass_fds=(descriptor,),
        start_new_session=True, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
