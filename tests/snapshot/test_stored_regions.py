"""Which regions are looked at again, which are referred to, and when a file is let go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainckpt.format.digest import digest
from trainckpt.format.manifest import FileEntry
from trainckpt.format.shard_file import Region
from trainckpt.snapshot import save_plan

LARGE = (64, 64)  # F32: 16 KiB


def region(name, shape=LARGE, dtype="F32"):
    return Region(name, dtype, (0,) * len(shape), shape, shape)


class Run:
    """Saves of one rank whose tensors have these contents, one after the other."""

    def __init__(self, untrained=()):
        self.known = save_plan.StoredRegions()
        self.untrained = set(untrained)
        self.saves = 0

    def save(self, **contents):
        """Contents by tensor, or (contents, region). What was looked at, and referred to where."""
        self.saves += 1
        planned = {n: (c[1] if type(c) is tuple else region(n)) for n, c in contents.items()}
        digests = {
            n: digest(str(c[0] if type(c) is tuple else c).encode()) for n, c in contents.items()
        }
        found = list(
            save_plan.candidates(self.known, planned.values(), self.untrained.__contains__)
        )
        looked = {r.key: digests[r.tensor] for r in found}
        references = save_plan.decide(self.known, planned.values(), looked)
        stored = [
            replace(r, digest=digests[n]) for n, r in planned.items() if r.key not in references
        ]
        size = sum(r.num_bytes for r in stored)
        entry = FileEntry(f"s{self.saves}~1.{self.saves}/rank00000.safetensors", size, "", "")
        self.known = save_plan.regions_after_save(self.known, entry, stored, references)
        return sorted(r.tensor for r in found), {
            key: int(file[1 : file.index("~")]) for key, file in references.items()
        }


def test_what_no_optimizer_trains_is_looked_at_from_the_second_save_on():
    run = Run(untrained=["base"])
    assert run.save(base=1, lora=1) == ([], {})
    assert run.save(base=1, lora=2) == (["base"], {"base": 1})
    assert run.save(base=1, lora=3) == (["base"], {"base": 1})


def test_what_is_trained_must_have_stayed_as_it_was_once():
    run = Run()
    assert run.save(a=1, b=1) == ([], {})
    assert run.save(a=1, b=2) == ([], {})
    assert run.save(a=1, b=3) == (["a"], {"a": 2})


def test_what_has_changed_is_written_and_left_in_peace_for_longer_each_time():
    run = Run(untrained=["a"])
    run.save(a=0, b=0)
    looks = []
    for save in range(40):
        same = save % 8  # changes at every eighth save
        looks.append(bool(run.save(a=save // 8, b=save)[0]))
        assert same or save == 0 or not run.known.held["a"].file.startswith("s1~")
    assert looks[0]
    assert [sum(looks[i : i + 8]) for i in range(0, 40, 8)] == [8, 6, 4, 1, 0]


def test_an_unlucky_guess_costs_no_exactness():
    run = Run(untrained=["a"])
    run.save(a=1)
    assert run.save(a=2) == (["a"], {})
    assert run.known.held["a"].region.digest == digest(b"2")


@pytest.mark.parametrize(
    "other",
    [
        region("a", (64, 65)),
        region("a", (4096,)),
        region("a", LARGE, "I32"),
        replace(region("a", (128, 64)), shape=LARGE),
        replace(region("a"), true_dtype="x"),
    ],
)
def test_another_box_shape_or_type_is_another_region(other):
    run = Run(untrained=["a"])
    run.save(a=(1, region("a")))
    assert run.save(a=(1, other)) == ([], {})


def test_the_part_of_another_row_is_another_region():
    parts = [replace(region("a", (128, 64)), offset=(row, 0), shape=LARGE) for row in (0, 64)]
    run = Run(untrained=["a"])
    run.save(a=(1, parts[0]))
    assert run.save(a=(1, parts[1])) == ([], {})
    assert run.save(a=(1, parts[1]))[1] == {"a[64:128]": 2}


def test_a_small_region_is_written_each_time():
    small = region("a", (2047,))
    run = Run(untrained=["a"])
    run.save(a=(1, small))
    assert run.save(a=(1, small)) == ([], {})


def test_a_file_of_which_less_than_a_third_is_used_is_let_go():
    names = [f"t{i}" for i in range(10)]
    run = Run(untrained=names)
    run.save(**dict.fromkeys(names, 0))
    three = {n: 0 if i < 3 else 1 for i, n in enumerate(names)}
    assert set(run.save(**three)[1].values()) == {1}  # 30 % of it
    two = {n: 0 if i < 2 else i for i, n in enumerate(names)}
    assert run.save(**two)[1] == {}
    assert set(run.known.files) == {"s3~1.3/rank00000.safetensors"}


def test_whatever_changes_all_files_hold_at_most_some_times_what_the_newest_needs():
    names = [f"t{i}" for i in range(40)]
    run, value = Run(untrained=names), dict.fromkeys(names, 0)
    for save in range(200):
        value[names[save * 7 % 40]] += 1  # one of forty between two saves
        run.known.needed.clear()  # so that all that can be referred to is
        _, references = run.save(**value)
        held = sum(file.num_bytes for file in run.known.files.values())
        assert held <= 40 * 16384 / save_plan.MIN_SHARE
        assert len(set(references.values())) <= save_plan.MAX_FILES


def test_no_more_files_are_referred_to_than_are_opened_cheaply():
    names = [f"t{i}" for i in range(12)]
    run = Run(untrained=names)
    for i in range(len(names)):
        run.save(**dict.fromkeys(names[: i + 1], 0))
    assert len(set(run.save(**dict.fromkeys(names, 0))[1].values())) == save_plan.MAX_FILES
    assert len(run.known.files) == save_plan.MAX_FILES + 1


def test_a_save_that_failed_changes_nothing_of_what_is_known():
    run = Run(untrained=["a"])
    run.save(a=1, b=1)
    planned = [region("a"), region("b")]
    before = dict(run.known.held)
    save_plan.decide(run.known, planned, {"a": digest(b"2")})
    assert run.known.held == before
    assert run.save(a=1, b=2) == ([], {})  # but that it had changed is not forgotten
