"""The watcher's threads: one rank alone, and ranks in one process over a store in memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import pytest
from torch.distributed import HashStore, TCPStore

from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice
from trainckpt.ranks import BoundaryGate, NoticeWatcher, RankStore, World, local_store
from trainckpt.ranks.rounds import decide_within

STOP = Notice("SIGTERM")
WINDOW = Notice("wall time", mode="window")
SAVE = Notice("every 5 min", action="save")


class Rank:
    """One rank's agreement and watcher."""

    def __init__(self, channel, sources=(), **options):
        self.gate = BoundaryGate()
        self.watcher = NoticeWatcher(self.gate, channel, sources, **options)
        self.watcher.start()

    def train(self, boundaries=10**9, until=None):
        """Pass boundaries until a stop is due, or save number `until`; what was due, and where."""
        dues = []
        for _ in range(boundaries):
            while due := self.gate.at_boundary():
                dues.append(
                    (self.gate.passed, due.notice.action, due.notice.mode, due.notice.number)
                )
                if due.notice.action == "stop":
                    return dues
                self.gate.close_round(due.round)
                if until is not None and due.notice.number == until:
                    return dues
        return dues


@pytest.fixture
def ranks():
    """Makes ranks, and stops their watchers at the end."""
    made = []

    def make(size=1, sources=(), *, store=None, only=None, **options):
        store = store or HashStore()
        for rank in range(size) if only is None else only:
            world = World(rank, size, rank, "here")
            channel = local_store(world) if size == 1 else RankStore(world, store, "test/1/")
            made.append(Rank(channel, sources if rank == 0 else (), **options))
        return made if size > 1 else made[-1]

    yield make
    for rank in made:
        rank.watcher.publish_final()
        rank.watcher.stop()


class Once:
    """A source without a descriptor that brings its notices at the first look."""

    def __init__(self, *notices):
        self.notices = list(notices)
        self.calls = []

    def start(self):
        self.calls.append("start")

    def fileno(self):
        return None

    def poll(self):
        notices, self.notices = self.notices, []
        return notices

    def stop(self):
        self.calls.append("stop")


class Broken(Once):
    def poll(self):
        raise OSError("no such device")


def together(ranks, until=None):
    """Train all ranks at once, each in its thread; what was due on each."""
    results = [None] * len(ranks)

    def train(index):
        results[index] = ranks[index].train(until=until)

    threads = [threading.Thread(target=train, args=(i,), daemon=True) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_the_keys_of_fifty_rounds_are_as_many_as_those_of_ten(ranks):
    """A run saves for weeks, and the store keeps what nobody deletes."""
    size, store = 3, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before, all_ranks = store.num_keys(), ranks(size, store=store)
    # An answer and a bell for each rank, a counter, a decision; and how many have left, as always.
    of_two_rounds = 2 * (2 * size + 2) + 1
    for number in range(1, 51):
        all_ranks[number % size].watcher.request_save(number)
        dues = together(all_ranks, until=number)
        assert {due[-1][3] for due in dues} == {number}
        if number in (10, 50):
            until_s = time.monotonic() + 30  # each listener deletes before it listens again
            while store.num_keys() != before + of_two_rounds:
                assert time.monotonic() < until_s, store.num_keys()
                time.sleep(0.01)


def test_alone_a_requested_save_is_due_at_the_very_next_boundary(ranks):
    """One rank needs nobody's answer."""
    rank = ranks()
    rank.train(3)
    rank.watcher.request_save(1, "best")
    assert rank.gate.at_boundary().notice.tag == "best"


def test_alone_a_notice_of_a_source_stops_the_training(ranks):
    """Also one that is only looked at once a second."""
    assert ranks(sources=[Once(STOP)]).train()[-1][1] == "stop"


def test_a_notice_without_a_mode_means_the_mode_that_was_configured(ranks):
    """`stop_at` decides what a plain SIGTERM is."""
    rank = ranks(mode=lambda _: "window")
    rank.watcher.request(STOP)
    assert rank.train()[0][2] == "window"


def test_a_notice_survives_an_estimate_that_fails(ranks):
    """Where to stop is chosen from measurements; without them, at the next micro-batch."""
    rank = ranks(mode=lambda _: 1 / 0)
    rank.watcher.request(STOP)
    assert rank.train()[0][2] == "micro-batch"
    assert "ZeroDivisionError" in rank.watcher.problems[0]


def test_a_stricter_stop_opens_a_round_and_the_same_or_a_laxer_one_does_not(ranks):
    """Ten SIGTERMs are one stop."""
    rank = ranks()
    for notice in (WINDOW, WINDOW, STOP, STOP, WINDOW):
        rank.watcher.request(notice)
    assert rank.gate.at_boundary(window_end=False).round == 2


def test_the_same_number_of_save_is_taken_once(ranks):
    """Asked for again, before and after it was taken."""
    rank = ranks()
    for number in (1, 1, 2):
        rank.watcher.request_save(number)
    assert [number for *_, number in rank.train(3)] == [1, 2]
    rank.watcher.request_save(1)
    assert rank.train(3) == []


def test_a_save_asked_for_at_each_boundary_until_it_is_taken_is_one_save(ranks):
    """A timer that is due stays due until the agreed boundary is reached."""
    rank = ranks()
    for _ in range(3):
        rank.watcher.request(SAVE)
    assert [action for _, action, *_ in rank.train(3)] == ["save"]
    rank.watcher.request(SAVE)
    assert [action for _, action, *_ in rank.train(3)] == ["save"]


def test_a_save_that_cannot_be_taken_is_skipped_and_reported(ranks):
    """Back-pressure: training goes on."""
    rank = ranks(can_save=lambda: False)
    rank.watcher.request_save(1)
    assert rank.train(2) == []
    assert [decision.notice.number for decision in rank.gate.skipped()] == [1]


def test_a_save_after_a_stop_opens_no_round(ranks):
    """The stop saves."""
    rank = ranks()
    rank.watcher.request(STOP)
    rank.watcher.request(SAVE)
    assert [action for _, action, *_ in rank.train()] == ["stop"]


def test_a_source_that_fails_is_named_and_the_others_are_heard(ranks):
    """A bad notice source must not deafen the run."""
    rank = ranks(sources=[Broken(), Once(STOP)])
    assert rank.train()[-1][1] == "stop"
    assert rank.watcher.problems == ["Broken failed: OSError: no such device"]


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_stop_where_a_host_has_no_thread_left_for_the_deadline(ranks, number):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    made = ranks(number, sources=[Once(STOP)], on_stop=refuse)
    several = made if number > 1 else [made]
    for dues in together(several):
        assert dues[-1][1] == "stop"
    for rank in several:
        (problem,) = rank.watcher.problems
        assert "can't start new thread" in problem


def test_several_ranks_stop_where_one_of_them_was_asked_to(ranks):
    """All at the same boundary."""
    three = ranks(3, sources=[Once(STOP)])
    first, *others = together(three)
    assert others == [first, first]
    assert first[-1][1] == "stop"


def test_a_stop_that_was_undone_before_a_rank_heard_of_it_binds_nobody(ranks):
    """All have stopped, go on, and forget up to round 2; only then does rank 1 hear of that one. It
    may keep no deadline of it, nor take the next stop for one that is known."""
    kept = []
    first, second = ranks(2, on_stop=kept.append)
    first.watcher.request(WINDOW)
    together([first, second])
    second.watcher.forget_stop(2)
    before = len(kept)
    first.watcher.request(STOP)  # stricter, so a round of its own
    dues = first.train()
    assert dues[-1][1:3] == ("stop", "micro-batch")
    first.watcher.forget_stop(2)
    until = time.monotonic() + 30.0
    while second.gate.has_open_round() and time.monotonic() < until:
        time.sleep(0.001)
    assert len(kept) == before + 1, "rank 0 alone has acted on it"
    second.watcher.request(STOP)
    assert [dues[-1][1] for dues in together([first, second])] == ["stop", "stop"]


def test_stop_and_save_asked_at_once_on_different_ranks_end_in_one_stop(ranks):
    """They may meet in one round or not; all ranks do the same."""
    three = ranks(3)
    three[0].watcher.request(SAVE)
    three[2].watcher.request(STOP)
    first, *others = together(three)
    assert others == [first, first]
    assert [action for _, action, *_ in first][-1] == "stop"


def test_each_numbered_save_is_taken_once_by_all_whoever_asks(ranks):
    """Numbers 1 and 2 have their own tags, so they are not merged."""
    three = ranks(3)
    for rank, number in ((0, 1), (0, 2), (1, 1)):
        three[rank].watcher.request_save(number)
    first, *others = together(three, until=2)
    assert others == [first, first]
    assert [number for *_, number in first] == [1, 2]


def test_watchers_that_wait_in_the_store_end_within_two_seconds_and_alone(ranks):
    """Each wakes only itself: the other goes on listening."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = ranks(2, store=store)
    began = time.monotonic()
    first.watcher.publish_final()
    first.watcher.stop()
    assert time.monotonic() - began < 2
    assert not any(thread.is_alive() for thread in first.watcher._threads)
    assert all(thread.is_alive() for thread in second.watcher._threads)
    second.watcher.request(STOP)
    assert second.train()[-1][1] == "stop"


def test_sources_are_started_and_stopped_with_the_watcher(ranks):
    """A second stop does nothing."""
    source = Once()
    rank = ranks(sources=[source])
    rank.watcher.stop()
    rank.watcher.stop()
    assert source.calls == ["start", "stop"]


def test_a_stop_that_a_rank_does_not_answer_fails_and_ends_the_process(ranks):
    """Rank 1 was never started; rank 0 learns it from the decision."""
    ended = threading.Event()
    (rank,) = ranks(2, only=[0], decision_timeout_s=0.05, on_failed_stop=lambda _: ended.set())
    rank.watcher.request(STOP)
    assert ended.wait(10)
    with pytest.raises(NoAgreement, match="no answer from rank 1"):
        rank.gate.at_boundary()


def test_a_save_that_a_rank_does_not_answer_is_skipped(ranks):
    """Training goes on; nobody is ended."""
    (rank,) = ranks(2, only=[0], decision_timeout_s=0.05, on_failed_stop=lambda _: 1 / 0)
    rank.watcher.request_save(1)
    assert rank.train(1) == []
    assert [decision.failed for decision in rank.gate.skipped()] == [True]


def test_a_finished_attempt_is_not_ended_by_a_stop_that_fails(ranks):
    """The final snapshot is committed; the notice comes too late to matter."""
    ended = threading.Event()
    (rank,) = ranks(2, only=[0], decision_timeout_s=0.2, on_failed_stop=lambda _: ended.set())
    rank.watcher.request(STOP)
    rank.gate.finish()
    for thread in rank.watcher._threads[1:]:
        thread.join(0.5)
    assert not ended.is_set()
    assert rank.gate.at_boundary() is None


def test_half_of_the_time_left_is_kept_for_the_save():
    """But no round is given up within its first second."""
    assert decide_within(20, None) == 20
    assert decide_within(20, 10) == 5
    assert decide_within(20, 0) == 1


LOST_STORE = """
    import os, sys
    from torch.distributed import TCPStore
    from trainckpt.notice import Notice
    from trainckpt.ranks import *

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    read, write = os.pipe()
    if os.fork() == 0:
        client = TCPStore("127.0.0.1", store.port, is_master=False)
        agreement = BoundaryGate()
        watcher = NoticeWatcher(agreement, RankStore(World(1, 2, 1, "here"), client))
        watcher.start()
        os.write(write, b"1")
        watcher._threads[1].join()
        assert agreement.at_boundary() is None, "training goes on without a store"
        watcher.request(Notice("SIGTERM"))
        os._exit(3)
    os.read(read, 1)
    os._exit(0)
"""


def test_a_stop_after_the_store_was_lost_ends_the_rank_with_71():
    """No decision can come: the rank says so instead of training into the kill."""
    program = LOST_STORE.replace(
        "os._exit(0)", "del store; sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert run_python(program) == (71, "")


def test_a_script_that_ends_without_closing_does_not_crash_the_interpreter():
    """Threads that wait in the store are ended before Python is."""
    program = """
        from torch.distributed import TCPStore
        from trainckpt.ranks import *

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(2):
            channel = RankStore(World(rank, 2, rank, "here"), store).connection()
            NoticeWatcher(BoundaryGate(), channel).start()
    """
    assert run_python(program) == (0, "")


def run_python(program):
    """Exit code and those lines of stderr that are not c10d's."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"TORCH_CPP_LOG_LEVEL": "FATAL", "PATH": ""},
    )
    return ended.returncode, ended.stderr
