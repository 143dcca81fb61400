"""Large pages: asked for where the system gives them to who asks, while they come quickly."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainckpt.tiers import direct, large_pages
from trainckpt.tiers.direct import HUGE_BYTES, PAGE_BYTES, address, memory
from trainckpt.tiers.large_pages import LargePages, given

real = pytest.mark.skipif(
    given().get(HUGE_BYTES) != "madvise", reason="this system gives no large pages to who asks"
)
GENERAL = "always [madvise] never"


@pytest.fixture(autouse=True)
def however_busy(monkeypatch):
    """The clock on the wall says nothing of pages where other tests have the cores."""
    monkeypatch.setattr(large_pages, "STALLED_S", 600.0)


def settings(folder, general=GENERAL, **sizes):
    """As in /sys: `k64="[always] inherit madvise never"`, and so on."""
    (folder / "enabled").write_text(f"{general}\n")
    (folder / "hpage_pmd_size").write_text(f"{HUGE_BYTES}\n")
    for size, text in sizes.items():
        (folder / f"hugepages-{size[1:]}kB").mkdir()
        (folder / f"hugepages-{size[1:]}kB" / "enabled").write_text(f"{text}\n")
    return folder


def chosen(word):
    return " ".join(f"[{w}]" if w == word else w for w in ("always", "inherit", "madvise", "never"))


@pytest.mark.parametrize(
    ("general", "sizes", "huge", "between"),
    [
        ("madvise", {}, True, False),  # Linux before 6.8
        ("always", {}, False, False),  # everybody has them: there is nothing to ask for
        ("never", {}, False, False),
        ("madvise", {"k2048": "inherit", "k64": "never"}, True, False),
        ("madvise", {"k2048": "inherit", "k64": "madvise"}, True, True),
        ("madvise", {"k2048": "never", "k64": "inherit", "k32": "never"}, False, True),
        ("always", {"k2048": "inherit", "k64": "madvise"}, False, True),
        ("never", {"k2048": "inherit", "k64": "always"}, False, False),
        ("never", {"k2048": "madvise", "k64": "never"}, True, False),
        ("madvise", {"k32768": "madvise"}, False, False),  # on other processors
    ],
)
def test_what_is_given_to_who_asks_is_read_from_the_system(tmp_path, general, sizes, huge, between):
    words = {size: chosen(word) for size, word in sizes.items()}
    pages = LargePages(settings(tmp_path, chosen(general), **words))
    assert (pages.huge, pages.between) == (huge, between)


def test_a_system_that_tells_nothing_has_none(tmp_path):
    assert given(tmp_path / "missing") == {}
    pages = LargePages(tmp_path / "missing")
    block = memory(2 * HUGE_BYTES)
    pages.make(block)
    assert asked(block) == 0


class Clock:
    """Says that each page took so many seconds, the last of them for all that follow."""

    def __init__(self, *seconds):
        self.seconds, self.now, self.calls = list(seconds), 0.0, 0

    def __call__(self):
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return self.now


def parts(block):
    """(bytes of it, flags) of each mapping that a block lies in."""
    begin, end = address(block), address(block) + len(block)
    found, inside = [], 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(text, 16) for text in first.split("-"))
            inside = max(0, min(high, end) - max(low, begin))
        elif first == "VmFlags:" and inside:
            found.append((inside, line.split()[1:]))
    return found


def asked(block):
    """For how many bytes large pages were asked for."""
    return sum(num_bytes for num_bytes, flags in parts(block) if "hg" in flags)


def there(block):
    """How many pages of it are there."""
    return sum(page_is_there(block, at) for at in range(0, len(block), PAGE_BYTES))


def aligned(num):
    """So many times 2 MiB."""
    whole = memory((num + 1) * HUGE_BYTES)
    first = -address(whole) % HUGE_BYTES
    return whole[first : first + num * HUGE_BYTES]


@real
def test_pages_that_come_quickly_are_all_made(tmp_path):
    block = aligned(4)
    pages = LargePages(settings(tmp_path), Clock(0.0))
    pages.prepare(block)
    assert not pages.is_slow
    assert asked(block) == len(block)
    assert there(block) == len(block) // PAGE_BYTES
    assert not any(block)


@pytest.mark.parametrize(
    ("general", "sizes", "seconds", "come"),
    [
        ("always", {}, 0.0, True),
        ("never", {"k64": "madvise"}, 0.0, True),
        ("never", {}, 0.0, False),
        pytest.param("madvise", {}, 0.0, True, marks=real),
        pytest.param("madvise", {}, 0.005, False, marks=real),
    ],
)
def test_whether_fresh_memory_comes_large_is_tried_where_it_is_not_known(
    tmp_path, general, sizes, seconds, come
):
    words = {size: chosen(word) for size, word in sizes.items()}
    clock = Clock(seconds)
    pages = LargePages(settings(tmp_path, chosen(general), **words), clock)
    assert pages.come_by_themselves == come
    tried = clock.calls
    assert bool(tried) == (general == "madvise")
    assert pages.come_by_themselves == come
    assert clock.calls == tried, "for a while it is known"


@real
def test_the_first_slow_page_is_the_last_for_a_while(tmp_path):
    first, second = aligned(4), aligned(2)
    pages = LargePages(settings(tmp_path), Clock(0.0, 0.005))
    pages.prepare(first)
    assert pages.is_slow
    assert asked(first) == 2 * HUGE_BYTES
    pages.prepare(second)
    assert asked(second) == 0
    pages.make(second)
    assert there(second) == len(second) // PAGE_BYTES


@real
@pytest.mark.parametrize(
    ("seconds", "made"),
    [
        ([0.0001] * 11 + [0.005, 0.0], 64),  # 4.4 ms were saved, and 0.5 lent
        ([0.0001] * 9 + [0.005, 0.0], 10),
        ([0.0001] * 9 + [0.005], 10),
        ([0.0001] * 30 + [0.005], 33),
        ([0.0] + [0.0011] * 9, 3),  # hardly slow: half a millisecond was lent, and one saved
        ([0.0009], 2),
        ([0.0011], 1),
    ],
)
def test_slow_pages_are_borne_while_the_quick_ones_have_saved_more(tmp_path, seconds, made):
    block = aligned(64)
    pages = LargePages(settings(tmp_path), Clock(*seconds))
    pages.prepare(block)
    assert asked(block) == made * HUGE_BYTES
    assert pages.is_slow == (made < 64)


@real
def test_what_was_saved_long_ago_is_not_spent_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(large_pages, "MOST_S", 0.005)
    block = aligned(64)
    pages = LargePages(settings(tmp_path), Clock(*[0.0] * 40, 0.005))
    pages.prepare(block)
    assert asked(block) == 42 * HUGE_BYTES


@real
def test_pages_between_are_asked_for_and_made_by_who_writes(tmp_path):
    block = memory(5 * HUGE_BYTES + 12345)[777:]
    sizes = {"k2048": chosen("never"), "k64": chosen("madvise")}
    LargePages(settings(tmp_path, **sizes)).prepare(block)
    assert asked(block) >= len(block) - 2 * PAGE_BYTES
    assert there(block) <= 1
    assert not any(block[:PAGE_BYTES])


@real
def test_behind_a_slow_page_those_between_are_kept_from_being_2_mib(tmp_path):
    """One small page is there in each: where something is, the system makes none as large."""
    block = aligned(6)
    sizes = {"k2048": chosen("inherit"), "k64": chosen("madvise")}
    LargePages(settings(tmp_path, **sizes), Clock(0.005)).prepare(block)
    assert asked(block) == len(block)
    rest = block[HUGE_BYTES:]
    present = [page_is_there(rest, at) for at in range(0, len(rest), HUGE_BYTES)]
    assert all(present)
    assert not page_is_there(rest, HUGE_BYTES // 2)


def page_is_there(block, at):
    where = (address(block) + at) // PAGE_BYTES
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(where * 8)
        return bool(int.from_bytes(pages.read(8), "little") >> 63)


@real
def test_where_pages_cannot_be_made_for_the_asking_none_is_measured_and_one_asked_for(
    tmp_path, monkeypatch
):
    """Linux before 5.14: what takes no time was not made."""
    monkeypatch.setattr(direct, "_POPULATE_WRITE", 9999)
    block = aligned(4)
    pages = LargePages(settings(tmp_path))
    pages.make(block)
    assert pages.is_slow
    assert asked(block) == HUGE_BYTES
    assert there(block) == 0


@real
def test_a_page_that_takes_long_although_its_thread_slept_is_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(large_pages, "STALLED_S", -1.0)
    block = aligned(4)
    pages = LargePages(settings(tmp_path), Clock(0.0))
    pages.prepare(block)
    assert pages.is_slow
    assert asked(block) == HUGE_BYTES


def test_memory_keeps_what_is_written_wherever_it_begins(tmp_path):
    sizes = {"k2048": chosen("inherit"), "k64": chosen("madvise")}
    pages = LargePages(settings(tmp_path, **sizes))
    for first, length in ((0, 10), (1, 3 * HUGE_BYTES), (PAGE_BYTES - 1, HUGE_BYTES + 2), (5, 0)):
        whole = memory(4 * HUGE_BYTES)
        whole[first : first + length] = bytes([7]) * length
        pages.make(whole[first : first + length])
        assert whole[first : first + length] == bytes([7]) * length
        assert not any(whole[first + length :][:PAGE_BYTES])


def test_what_cannot_be_written_to_is_left_alone(tmp_path):
    LargePages(settings(tmp_path)).make(memoryview(b"read only" * HUGE_BYTES)[:HUGE_BYTES])
