"""Checks of a tier against `base.Tier`: `for check in CHECKS: check(tier)`.

Each check needs an empty location. They fit tiers written by others too. Refusals by nature (no
space, no permission) are left to the tier's own tests.
"""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import TierUnavailable, TrainckptError, UnusableSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.storage.base import Tier

NUM_CREATORS = 4
LARGE_BYTES = 33 << 20  # more than a store takes in one request, and no whole number of parts
BAD_KEYS = ("../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\0")


def what_is_written_is_read(tier: Tier) -> None:
    """Check the order of blocks: they are read back as one sequence of bytes."""
    tier.write("x/y", _views(b"one", b"", b"two"))
    assert tier.read("x/y", max_bytes=6) == b"onetwo"
    assert (tier.size("x/y"), tier.list("x"), tier.list("")) == (6, ["y"], ["x"])
    assert bytes(_read(tier, "x/y", 3, 2)) == b"tw"


def nothing_is_bytes_too(tier: Tier) -> None:
    """Check empty files."""
    tier.write("f/empty", [])
    tier.write_parts("f/parts", 0, [])
    tier.replace("f/replaced", b"")
    assert [tier.size(f"f/{name}") for name in tier.list("f")] == [0, 0, 0]
    for most in (0, 100):
        assert tier.read("f/empty", max_bytes=most) == b""


def parts_come_in_any_order(tier: Tier) -> None:
    """Check parts put out of order, with all memory unchanged until the end."""
    tier.write_parts("k", 9, [(3, memoryview(b"456")), (6, memoryview(b"789")), (0, _THREE)])
    assert tier.read("k", max_bytes=9) == b"123456789"


def large_files_are_written_and_read_in_parts(tier: Tier) -> None:
    """Check large files; the head of a shard file is put last."""
    data = memoryview(_pattern(LARGE_BYTES + 12345))
    head = 4096
    tier.write_parts("f/parts", len(data), iter([(head, data[head:]), (0, data[:head])]))
    tier.write("f/blocks", (data[at : at + 3_000_001] for at in range(0, len(data), 3_000_001)))
    for key in ("f/parts", "f/blocks"):
        assert tier.size(key) == len(data)
        into = memoryview(bytearray(len(data)))
        cuts = [0, 100, 4096, 9_000_000, len(data)]
        wanted = [(a, into[a:b]) for a, b in itertools.pairwise(cuts)]
        done: list[int] = []
        tier.read_parts(key, [*wanted, (7, memoryview(b""))], done.append)
        assert into == data
        assert sorted(done) == [0, 1, 2, 3, 4]
    tier.remove_folder("f")


def what_fails_leaves_no_key(tier: Tier) -> None:
    """Check failed writes, refused by the tier or raised by the iterator of parts."""
    data = memoryview(bytes(17 << 20))

    def broken() -> Iterator[tuple[int, memoryview]]:
        yield 0, data
        raise _Broken

    _must_raise(_Broken, lambda: tier.write_parts("a", 2 * len(data), broken()))
    _must_raise(_Broken, lambda: tier.write("b", (part for _, part in broken())))
    _must_raise(ValueError, lambda: tier.write_parts("c", 6, [(3, _THREE)]))
    _must_raise(ValueError, lambda: tier.write_parts("d", 6, [(0, _THREE), (2, _THREE)]))
    assert tier.list("") == []


def a_key_is_written_once_and_replaced_whole(tier: Tier) -> None:
    """Check a second `write`: it is refused; only `replace` overwrites."""
    tier.write("k", _views(b"old"))
    _must_raise(TierUnavailable, lambda: tier.write("k", _views(b"new")))
    _must_raise(TierUnavailable, lambda: tier.write_parts("k", 3, [(0, _THREE)]))
    assert tier.read("k", max_bytes=9) == b"old"
    tier.replace("k", b"newer")
    assert tier.read("k", max_bytes=9) == b"newer"


def what_is_replaced_stands_until_the_new_bytes_are_whole(tier: Tier) -> None:
    """Check `replacing`, small and large, over an old key and a missing one, failing and not."""
    large = memoryview(bytes(17 << 20))
    tier.write("f/k", _views(b"old"))

    def broken(*blocks: memoryview) -> Iterator[memoryview]:
        yield from blocks
        assert tier.read("f/k", max_bytes=9) == b"old"
        raise _Broken

    for key, blocks in itertools.product(("f/k", "f/absent"), ([_THREE], [large, large])):
        _must_raise(_Broken, partial(tier.write, key, broken(*blocks), replacing=True))
    assert tier.read("f/k", max_bytes=9) == b"old"
    assert tier.list("f") == ["k"]
    for key in ("f/k", "f/new"):
        for new in (b"newer", b"", bytes(large) * 2):
            tier.write(key, _views(new), len(new), replacing=True)
            assert tier.read(key, max_bytes=len(new)) == new
    tier.clear_unfinished("f")
    assert tier.list("f") == ["k", "new"]
    tier.clear_unfinished("absent")
    tier.remove_folder("f")


def readers_see_the_old_bytes_or_the_new(tier: Tier) -> None:
    """Check reads while another thread replaces the key."""
    texts = (b"a" * 100_000, b"b" * 50_000)
    tier.replace("k", texts[0])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for text in reversed(texts):
                tier.replace("k", text)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        found = {tier.read("k", max_bytes=len(texts[0])) for _ in range(20)}
    finally:
        stop.set()
        thread.join()
    assert found <= set(texts)


def one_of_many_creators_wins(tier: Tier) -> None:
    """Check `create` from several threads: the losers change nothing."""
    barrier, won = threading.Barrier(NUM_CREATORS), list[int]()

    def create(number: int) -> None:
        barrier.wait()
        if tier.create("claims/1", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(NUM_CREATORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1, f"created by {won}"
    assert tier.read("claims/1", max_bytes=9) == b"%d" % won[0]
    assert tier.list("claims") == ["1"]
    assert not tier.create("claims/1", b"x")
    tier.replace("top", b"1")
    assert not tier.create("top", b"x")


def what_is_absent_is_absent(tier: Tier) -> None:
    """Check absent keys and folders: size, list and remove raise no error."""
    assert tier.size("k") is None
    assert tier.list("folder") == []
    tier.remove("k")
    tier.remove_folder("folder")
    _must_raise(UnusableSnapshot, lambda: tier.read("k", max_bytes=1))
    _must_raise(UnusableSnapshot, lambda: _read(tier, "k", 0, 1))


def what_is_removed_is_gone(tier: Tier) -> None:
    """Check the removal of one name, of part of a folder, and of a whole folder."""
    for name in ("k", "l", "m"):
        tier.write(f"f/{name}", _views(b"1"))
    tier.remove("f/k")
    assert tier.list("f") == ["l", "m"]
    tier.remove_folder("f", keep=["l"])
    assert tier.list("f") == ["l"]
    tier.remove_folder("f")
    assert tier.list("") == []


def reading_never_goes_beyond_what_was_asked_or_what_is_there(tier: Tier) -> None:
    """Check a record too large and a file too short: both are errors."""
    tier.write("k", _views(b"1234"))
    _must_raise(UnusableSnapshot, lambda: tier.read("k", max_bytes=3))
    _must_raise(UnusableSnapshot, lambda: _read(tier, "k", 2, 3))
    _must_raise(UnusableSnapshot, lambda: _read(tier, "k", 9, 1))


def what_done_raises_ends_the_reading(tier: Tier) -> None:
    """Check an error raised by `done`: `read_parts` raises it."""
    tier.write("k", _views(b"1234"))
    parts = [(at, memoryview(bytearray(1))) for at in range(4)]

    def done(_: int) -> None:
        raise _Broken

    _must_raise(_Broken, lambda: tier.read_parts("k", parts, done))


def names_with_a_common_beginning_are_apart(tier: Tier) -> None:
    """Check names with a common prefix: they are different folders."""
    tier.write("s1/k", _views(b"1"))
    tier.write("s10/l", _views(b"2"))
    assert (tier.list("s1"), tier.list("s10"), tier.list("")) == (["k"], ["l"], ["s1", "s10"])
    tier.remove_folder("s1")
    assert tier.list("") == ["s10"]
    assert tier.size("s1") is None


def a_key_cannot_leave_the_place(tier: Tier) -> None:
    """Check keys leading out of the location, as a manifest could name them."""
    acts: Sequence[Callable[[str], object]] = (
        tier.size,
        tier.list,
        tier.remove,
        lambda key: tier.replace(key, b""),
    )
    for key in BAD_KEYS:
        for act in acts:
            _must_raise(UnusableSnapshot, lambda act=act, key=key: act(key))  # type: ignore[misc]


CHECKS: Sequence[Callable[[Tier], None]] = (
    what_is_written_is_read,
    nothing_is_bytes_too,
    parts_come_in_any_order,
    large_files_are_written_and_read_in_parts,
    what_fails_leaves_no_key,
    a_key_is_written_once_and_replaced_whole,
    what_is_replaced_stands_until_the_new_bytes_are_whole,
    readers_see_the_old_bytes_or_the_new,
    one_of_many_creators_wins,
    what_is_absent_is_absent,
    what_is_removed_is_gone,
    reading_never_goes_beyond_what_was_asked_or_what_is_there,
    what_done_raises_ends_the_reading,
    names_with_a_common_beginning_are_apart,
    a_key_cannot_leave_the_place,
)

_THREE = memoryview(b"123")


class _Broken(Exception):
    """Error raised by a check's own code."""


def _views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def _read(tier: Tier, key: str, first_byte: int, num_bytes: int) -> bytearray:
    into = bytearray(num_bytes)
    tier.read_into(key, first_byte, memoryview(into))
    return into


def _pattern(num_bytes: int) -> bytes:
    """Return bytes without two equal parts."""
    numbers = b"".join(number.to_bytes(4, "little") for number in range(1 << 16))
    whole = b"".join(bytes([at % 251]) + numbers for at in range(num_bytes // len(numbers) + 1))
    return whole[:num_bytes]


def _must_raise(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    except TrainckptError as error:
        raise AssertionError(f"raised {error!r}, not {kind.__name__}") from error
    raise AssertionError(f"no {kind.__name__} was raised")
