"""The numbers of a dumped tree stay free as far as that can be had, and are waited for."""

from __future__ import annotations

import subprocess
import time
from threading import Thread

import pytest

from tests.process_dump.taken_pid import next_is, with_number
from trainckpt.errors import UnusableSnapshot
from trainckpt.process_dump import criu, dump, ids_and_ports, process_tree, restore


@pytest.mark.parametrize(
    ("last", "taken", "after"),
    [
        (100, [], 100),
        (100, [90, 100], 100),  # behind it: their turn is far away
        (100, [105, 101], 105),
        (100, [151], 100),
        (100, [150], 150),
        (100, [140, 190, 240, 291], 240),  # each is within reach of the one before
        (990, [5, 991], 5),  # all are below 1000; then it begins again
    ],
)
def test_the_count_goes_on_after_all_numbers_that_are_within_reach(last, taken, after):
    assert ids_and_ports.turn_after(last, taken, 1000, ahead=50) == after


def test_a_count_that_has_no_way_around_ends():
    assert ids_and_ports.turn_after(7, range(0, 1000, 10), 1000, ahead=50) in range(0, 1000, 10)


def test_what_is_started_while_criu_restores_takes_no_number_of_the_trees(counting, monkeypatch):
    """Their turn would be soon, and whoever got one would keep it."""
    record, real, others = counting.dump(), criu.restore, []

    def restored(*arguments):
        others.extend(subprocess.Popen(["sleep", "600"]) for _ in range(60))
        return real(*arguments)

    monkeypatch.setattr(criu, "restore", restored)
    try:
        with next_is(max(min(record.tasks) - 30, 2)):
            counting.restore(record)
        assert counting.counts_on()
        assert len(others) == 60  # CRIU was asked once
        assert not {each.pid for each in others} & {*record.tasks}
    finally:
        for each in others:
            each.kill()
            each.wait()


def test_what_is_started_after_a_dump_takes_no_number_of_the_trees(counting):
    others, tasks = [], process_tree.tasks([counting.process.pid])
    try:
        with next_is(max(min(tasks) - 30, 2)):
            record = counting.dump()
            others += [subprocess.Popen(["sleep", "600"]) for _ in range(60)]
        assert [*record.tasks] == tasks
        assert not {each.pid for each in others} & {*tasks}
        counting.restore(record)
        assert counting.counts_on()
    finally:
        for each in others:
            each.kill()
            each.wait()


def test_a_taken_number_is_said_before_what_came_of_it():
    log = "".join(f"(0.1) Error (criu/x.c:{n}): other {n} {'x' * 100}\n" for n in range(5))
    said = criu.said(f"{log}(0.2) Error (criu/pie/restorer.c:1): Unable to create a thread: -17\n")
    assert said.startswith("Unable to create a thread: -17; other 0")
    assert criu.is_number_taken(said)
    assert not criu.is_number_taken(criu.said(log))
    other = "(0.2) Error (criu/pie/restorer.c:1): Unable to create a thread: -11\n"
    assert not criu.is_number_taken(criu.said(other + log))


@pytest.mark.parametrize("whose", ["the process's", "a thread's"])
@pytest.mark.parametrize("for_good", [False, True])
def test_a_number_that_is_taken_as_criu_begins_is_waited_for(
    counting, monkeypatch, for_good, whose
):
    record, real, said, others = counting.dump(), criu.restore, [], []
    wanted = record.root if whose == "the process's" else max(record.tasks)
    monkeypatch.setattr(dump, "GONE_WITHIN_S", 0.5)
    monkeypatch.setattr(restore, "GONE_WITHIN_S", 0.5 if for_good else 60.0)

    def restored(*arguments):
        if not others:
            others.append(with_number(wanted, besides=record.tasks))
            if not for_good:
                Thread(target=soon).start()
        said.append(real(*arguments))
        return said[-1]

    def soon():
        """Once nobody waits for it as for one of the tree."""
        time.sleep(2.0)
        others[0].kill()
        others[0].wait()

    monkeypatch.setattr(criu, "restore", restored)
    try:
        if for_good:
            with pytest.raises(UnusableSnapshot, match="could not be restored, says CRIU"):
                counting.restore(record)
            assert len(said) == 1
            assert process_tree.taken(record.tasks) == [wanted], "something of the tree is left"
            others[0].kill()
            others[0].wait()
        counting.restore(record)
        assert counting.counts_on()
        assert said[1:] == [""]
        assert criu.is_number_taken(said[0]), said
    finally:
        others[0].kill()
        others[0].wait()
