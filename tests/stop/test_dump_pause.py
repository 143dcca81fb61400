"""A stop at which the processes may be dumped: refused, or brought back as another attempt.

One process, and instead of a supervisor a thread that writes what one would: that processes can be
dumped is tried in tests/process_dump.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from tests.end_to_end.training import Parts, attempt
from tests.limits import HANG_S
from tests.preemption.test_gpu_health import Fake
from trainckpt.attempt import status_files
from trainckpt.attempt.record_writer import AttemptId
from trainckpt.attempt.script_hooks import Hooks
from trainckpt.dumping import handshake
from trainckpt.dumping.handshake import DumpRequest
from trainckpt.errors import UnusableSnapshot
from trainckpt.notice import Notice
from trainckpt.ranks.store import RankStore
from trainckpt.ranks.world import World
from trainckpt.snapshot import attempt_history
from trainckpt.state import memory_discard
from trainckpt.state.captured import Captured
from trainckpt.state.destination import Destination
from trainckpt.stop.dump_pause import DumpPause
from trainckpt.storage import connections
from trainckpt.storage.local import LocalTier

WIDTH = 4096  # so that a weight, and its moments, are some pages


class Ended(Exception):
    """Instead of the process's end."""


class Supervisor:
    """Makes one request, waits until the rank rests, and does something then."""

    takes_s = 0.0  # from the first process that runs again to the last

    def __init__(self, folder, run, then):
        self.folder, self.run = folder, run
        self.request = DumpRequest(os.urandom(4).hex(), os.getpid())
        self.told = None
        handshake.write_request(folder, self.request)
        self._thread = threading.Thread(target=self._look, args=(then,), daemon=True)
        self._thread.start()

    def _look(self, then):
        until = time.monotonic() + HANG_S
        while not (found := handshake.quiesced_ranks(self.folder, self.request)):
            if time.monotonic() > until:
                return
            time.sleep(0.005)
        (self.told,) = found
        then(self)

    def refuse(self):
        handshake.refuse_request(self.folder, self.request, "there is no room")

    def restore(self):
        """What a restore does: the next attempt is claimed, and the ranks find its number."""
        tier = LocalTier(self.run)
        before = attempt_history.read_attempts(tier)[1]
        claimed = attempt_history.claim(
            tier, lambda number: before.with_(attempt=number, parent="dump~1.99", outcome=None)
        )
        for name, text in status_files.restore_files(claimed.attempt, 0.0, None).items():
            (self.folder / name).write_text(text)
        time.sleep(self.takes_s)
        self.let_go_at = time.monotonic()
        status_files.announce_all_run(self.folder)

    def join(self):
        self._thread.join(HANG_S)
        return self.told


@pytest.fixture
def folder(tmp_path, monkeypatch):
    found = tmp_path / "supervisor"
    found.mkdir()
    monkeypatch.setenv("TRAINCKPT_SUPERVISOR", str(found))
    return found


def trained(run, seen, stops, **hooks):
    """Train to the end, or to a stop that stands; `stops`: micro-batch -> called before it."""

    def inside(ckpt, _):
        if not seen:
            for name, hook in hooks.items():
                getattr(ckpt, name)(hook)
        before = stops.pop(len(seen), None)
        if before is not None:
            before()
            ckpt._listener.watcher.request(Notice("asked", seconds_left=300.0))

    return attempt(run, inside=inside, seen=seen, parts=Parts(width=WIDTH), on_stop="return")


def records(run):
    return attempt_history.read_attempts(LocalTier(run))


def test_what_comes_back_trains_on_and_what_is_refused_stops(tmp_path, folder):
    """Two stops in one process: the first is undone, the dump at the second is refused."""
    straight = {}
    parts, _ = attempt(tmp_path / "straight", seen=straight, parts=Parts(width=WIDTH))
    run, seen, called, made = tmp_path / "run", {}, [], []

    def order(then):
        made.append(Supervisor(folder, run, then))

    stops = {3: lambda: order(Supervisor.restore), 6: lambda: order(Supervisor.refuse)}
    trained(
        run,
        seen,
        stops,
        before_dump=lambda: called.append("held" if connections.are_held() else "closed"),
        after_restore=lambda: called.append("held" if connections.are_held() else "open"),
    )
    assert called == ["closed", "open", "closed"]
    first, second = (supervisor.join() for supervisor in made)
    assert first.snapshot.split("~")[1].startswith("1.")
    assert first.dropped > 3 * WIDTH * 4  # a weight and its moments, but for the edges
    assert second.dropped > 0
    one, two = records(run)[1], records(run)[2]
    assert one.outcome is None  # a supervisor would say that it was dumped
    assert two.outcome["outcome"] == "stopped"
    assert two.outcome["no_dump"] == "there is no room"
    assert two.outcome["snapshot"].split("~")[1].startswith("2.")

    last, _ = attempt(run, seen=seen, parts=Parts(width=WIDTH))
    assert last.state() == parts.state()
    assert seen == straight


def test_nvml_is_shut_down_while_the_ranks_rest_and_open_after_a_restore(
    tmp_path, folder, monkeypatch
):
    nvml, at_rest, after = Fake(), [], []
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("TRAINCKPT_NOTICES", "nvml")

    def await_open():
        until = time.monotonic() + HANG_S
        while not nvml.num_open and time.monotonic() < until:
            time.sleep(0.001)
        return nvml.num_open

    def restore(supervisor):
        at_rest.append(nvml.num_open)
        supervisor.restore()

    def order():
        assert await_open() == 1
        Supervisor(folder, tmp_path / "run", restore)

    trained(tmp_path / "run", {}, {3: order}, after_restore=lambda: after.append(await_open()))
    assert (at_rest, after) == ([0], [1])


def test_nothing_is_done_before_all_processes_were_let_go(tmp_path, folder):
    """A rank that is refused ends, and whoever still holds another process would end them all."""
    run, made, opened = tmp_path / "run", [], []

    class Slow(Supervisor):
        takes_s = 0.3

    stops = {3: lambda: made.append(Slow(folder, run, Slow.restore))}
    hook = {"after_restore": lambda: opened.append(time.monotonic())}
    trained(run, {}, stops, before_dump=lambda: None, **hook)
    made[0].join()
    assert len(opened) == 1
    assert opened[0] >= made[0].let_go_at


def test_nobody_waits_for_a_supervisor_that_is_gone(tmp_path, monkeypatch):
    with subprocess.Popen(["true"]) as gone:
        pass
    (tmp_path / status_files.RESTORING_FILE).write_text(str(gone.pid))
    monkeypatch.setattr(status_files, "POLL_EVERY_S", 3600.0)
    status_files.wait_until_all_run(tmp_path)


def test_a_hook_that_fails_before_means_no_dump(tmp_path, folder):
    def closing():
        raise RuntimeError("no answer")

    made = []
    stops = {2: lambda: made.append(Supervisor(folder, tmp_path / "run", Supervisor.refuse))}
    trained(tmp_path / "run", {}, stops, before_dump=closing)
    outcome = records(tmp_path / "run")[1].outcome
    assert outcome["outcome"] == "stopped"
    assert "the before_dump hook" in outcome["no_dump"]
    assert "closing raised RuntimeError: no answer" in outcome["no_dump"]
    assert handshake.quiesced_ranks(folder, made[0].request) == []


@pytest.mark.parametrize("what", ["hook", "memory"])
def test_what_does_not_come_back_whole_ends_at_once(tmp_path, folder, monkeypatch, what):
    """A hook that fails, or memory that is not what it was."""

    def end(_, why):
        raise Ended(why)

    def elsewhere(dropped):
        copies = {name: tensor.clone() for name, tensor in dropped.tensors.items()}
        return Destination(dropped.wanted, into=copies)

    def opening():
        raise OSError("refused")

    monkeypatch.setattr(DumpPause, "_exit", end)
    if what == "memory":
        monkeypatch.setattr(memory_discard.DroppedMemory, "destination", elsewhere)
    hooks = {"after_restore": opening} if what == "hook" else {}
    stops = {2: lambda: Supervisor(folder, tmp_path / "run", Supervisor.restore)}
    with pytest.raises(Ended, match=r"after_restore hook|not what it was before") as why:
        trained(tmp_path / "run", {}, stops, **hooks)
    assert ("opening raised OSError: refused" in str(why.value)) == (what == "hook")


def test_memory_that_was_dropped_is_empty_and_is_told_from_what_it_was():
    """What lies column-major, or is small, stays."""
    tensors = {"a": torch.randn(300, 300), "b": torch.randn(10), "c": torch.randn(300, 300).t()}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    dropped = memory_discard.drop(Captured(tensors=dict(tensors)), ["a", "b", "c"])
    assert set(dropped.tensors) == {"a"}
    assert dropped.num_bytes >= 300 * 300 * 4 - 2 * 4096
    assert torch.equal(tensors["b"], kept["b"])
    assert torch.equal(tensors["c"], kept["c"])
    assert (tensors["a"] == 0).sum() >= dropped.num_bytes // 4
    with pytest.raises(UnusableSnapshot, match="not what it was before the dump: a"):
        dropped.filled()
    tensors["a"].copy_(kept["a"])
    dropped.filled()


class Memory:
    """What was dropped on one rank; it may not come back."""

    def __init__(self, comes_back):
        self.comes_back, self.is_whole, self.collective = comes_back, False, 0

    def refill(self):
        if not self.comes_back:
            raise UnusableSnapshot("its file is damaged")

    def make_buckets(self):
        self.collective += 1


def test_a_rank_whose_memory_does_not_come_back_keeps_no_other_waiting(monkeypatch):
    """Two ranks over one store: neither begins what is collective, and both end, and say why."""

    def end(_, why):
        raise Ended(why)

    monkeypatch.setattr(DumpPause, "_exit", end)
    store, memories = HashStore(), [Memory(comes_back=True), Memory(comes_back=False)]

    def come_back(rank):
        channel = RankStore(World(rank, 2, rank, "here"), store)
        rest = DumpPause(
            channel=channel,
            hooks=Hooks(),
            number=AttemptId(1),
            listener=None,
            status_writer=None,
            lean=memories[rank],
        )
        with pytest.raises(Ended) as why:
            rest._come_back()
        return str(why.value)

    with ThreadPoolExecutor(2) as ranks:
        said = list(ranks.map(come_back, range(2)))
    assert all("rank 1: its file is damaged" in each for each in said)
    assert [memory.collective for memory in memories] == [0, 0]
