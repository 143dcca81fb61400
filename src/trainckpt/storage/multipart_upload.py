"""Upload large objects in parts, several in flight.

A part is sent as soon as all its bytes are there, in any order; a failed part is sent again alone.
Anything ending an upload early aborts it, so a store keeps no parts of abandoned objects.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.storage import connections
from trainckpt.storage.store_errors import ABSENT, meaning
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.storage.object_client import ObjectClient, Upload
    from trainckpt.storage.retry import RetryPolicy

    # Sends one part; a sender thread calls for its bytes.
    Put = Callable[[int, Callable[[], bytes]], None]

MOST_PARTS = 9_000  # S3 takes 10,000
NUM_SENDERS = 4


def part_bytes(num_bytes: int, usual: int) -> int:
    """Return the bytes per part for an object of this size, within the allowed number of parts."""
    least = -(-num_bytes // MOST_PARTS)
    return usual if least <= usual else -(-least // (1 << 20)) * (1 << 20)


def gathered(blocks: Iterable[memoryview], num_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of `blocks`, `num_bytes` at a time; the last may be shorter."""
    held = bytearray()
    for block in blocks:
        at = 0
        while at < len(block):
            piece = block[at : at + num_bytes - len(held)]
            held += piece
            at += len(piece)
            if len(held) == num_bytes:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


class Pieces:
    """Bytes coming as (first byte, memory) in any order, cut into parts of one size."""

    def __init__(self, num_bytes: int, size: int, *, in_order: bool) -> None:
        self._num_bytes, self._size, self._in_order = num_bytes, size, in_order
        self._pieces: dict[int, list[tuple[int, memoryview]]] = {}
        self._missing: dict[int, int] = {}
        self._next = 1  # with `in_order`: the first part not returned yet
        self._got = 0

    def add(self, first_byte: int, memory: memoryview) -> list[int]:
        """Add bytes; return the numbers of the parts ready to send.

        Raises:
            ValueError: bytes outside the object, or put twice.
        """
        if first_byte < 0 or first_byte + len(memory) > self._num_bytes:
            raise ValueError(f"bytes {first_byte} + {len(memory)} lie outside {self._num_bytes}")
        self._got += len(memory)
        whole, at = [], 0
        while at < len(memory):
            number = (first_byte + at) // self._size + 1
            begin = first_byte + at - (number - 1) * self._size
            piece = memory[at : at + self._size - begin]
            self._pieces.setdefault(number, []).append((begin, piece))
            missing = self._missing.setdefault(number, self._length(number)) - len(piece)
            self._missing[number] = missing
            if missing < 0:
                raise ValueError(f"bytes of part {number} were put twice")
            if missing == 0:
                whole.append(number)
            at += len(piece)
        return self._in_turn() if self._in_order else whole

    def take(self, number: int) -> bytes:
        """Return the bytes of a part, and drop them."""
        pieces = sorted(self._pieces.pop(number), key=lambda piece: piece[0])
        at = 0
        for begin, piece in pieces:
            if begin != at:
                raise ValueError(f"byte {at} of part {number} was not put once")
            at += len(piece)
        return b"".join(piece for _, piece in pieces)

    def must_be_whole(self) -> None:
        """Check the total number of bytes put.

        Raises:
            ValueError: bytes are missing.
        """
        if self._got != self._num_bytes:
            raise ValueError(f"{self._got} bytes were put, not {self._num_bytes}")

    def _length(self, number: int) -> int:
        return min(self._size, self._num_bytes - (number - 1) * self._size)

    def _in_turn(self) -> list[int]:
        ready = []
        while self._missing.get(self._next) == 0:
            ready.append(self._next)
            self._next += 1
        return ready


@contextmanager
def uploading(
    calls: RetryPolicy, client: ObjectClient, *, path: str, key: str, size: int, left: set[str]
) -> Iterator[tuple[Put, bool]]:
    """Make an object at `path` when the context ends without an error; else leave nothing.

    Args:
        calls, client: Retries and client of the store.
        path, key: The object's path with bucket and run directory, and without.
        size: Bytes per part.
        left: Set of paths; gets this one if aborting failed: see `drop_left`.

    Yields:
        A function sending one part, and True if parts must come in order.
    """
    tries, upload = 0, None
    sent: dict[int, int] = {}

    def begin(tried: int) -> Upload:
        nonlocal tries
        tries = tried + 1
        return client.begin(path, size)

    def send(upload: Upload, number: int, data: Callable[[], bytes]) -> None:
        held, what = data(), f"write part {number} of {key}"
        sent[number] = len(held)
        if upload.again:
            calls.make(what, lambda _: upload.part(number, held))
            return
        try:
            with connections.request():
                upload.part(number, held)
        except Exception as error:
            raise calls.translated(what, error) from error

    def complete(upload: Upload, tried: int) -> None:
        try:
            upload.complete()
        except Exception as error:
            # An earlier try may have succeeded without its answer arriving.
            num_bytes = sum(sent.values())
            if not (tried and meaning(error) == ABSENT and client.size(path) == num_bytes):
                raise

    try:
        upload = calls.make(f"write {key}", begin)
        with Workers(1 if upload.in_order else NUM_SENDERS, "trainckpt-send") as workers:

            def put(number: int, data: Callable[[], bytes]) -> None:
                workers.settle(NUM_SENDERS - 1)
                workers.submit(partial(send, upload, number, data))

            yield put, upload.in_order
            workers.settle()
        calls.make(f"finish {key}", partial(complete, upload))
    except BaseException:
        left.add(path)
        if upload is not None and tries == 1:
            begun = upload
            with suppress(TrainckptError):
                calls.make(f"abort the upload of {key}", lambda _: begun.abort())
                left.discard(path)
        drop_left(calls, client, left)
        raise
    if tries > 1:  # each try may have begun an upload
        left.add(path)


def drop_left(calls: RetryPolicy, client: ObjectClient, left: set[str]) -> None:
    """Abort uploads again that could not be aborted before, by their paths."""
    for path in list(left):
        with suppress(TrainckptError):
            calls.make("abort an upload", partial(lambda p, _: client.abort_uploads(p), path))
            left.discard(path)
