"""What ranks do in the tests with real processes: small trainings without a model."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed

from trainckpt.errors import TrainckptError
from trainckpt.preemption import SignalSource
from trainckpt.ranks import BoundaryGate, NoticeWatcher, connect, current_world
from trainckpt.ranks.exchange import Exchange


class Training:
    """A rank that passes boundaries, notes what is due, and leaves as the owner has to."""

    def __init__(self, coupled=False, **options):
        self.channel = connect(current_world(), "test/1")
        self.rank = self.channel.world.rank
        self.gate = BoundaryGate()
        self.watcher = NoticeWatcher(self.gate, self.channel, [SignalSource()], **options)
        self.coupled = coupled
        self.dues = []
        self.watcher.start()
        self.channel.barrier("all ranks watch", 30)

    def boundary(self):
        """One boundary; False once a stop is due."""
        while due := self.gate.at_boundary():
            self.dues.append(
                (
                    self.gate.passed,
                    due.notice.action,
                    due.notice.reason,
                    due.notice.number,
                    due.notice.tag,
                )
            )
            if due.notice.action == "stop":
                return False
            self.gate.close_round(due.round)
        return True

    def micro_batch(self):
        """Work that takes longer on higher ranks, and a collective where ranks are coupled."""
        sum(range((2 + self.rank) * 5_000))
        if self.coupled:
            torch.distributed.all_reduce(torch.ones(1))

    def leave(self):
        """As after `Stopped`: the others go first through a barrier, then nobody answers."""
        self.channel.barrier("all ranks leave", 30)
        self.watcher.publish_final()
        self.watcher.stop()
        self.channel.barrier("all ranks left", 30)
        assert self.watcher.problems == []
        return self.dues


def terminate_myself():
    os.kill(os.getpid(), signal.SIGTERM)


def train_until_signalled(rank, coupled, signalled):
    """Each rank in `signalled` gets a real SIGTERM after its given number of micro-batches."""
    training = Training(coupled)
    while training.boundary():
        training.micro_batch()
        if training.gate.passed == signalled.get(rank):
            terminate_myself()
    return training.leave()


def save_on_one_then_stop_on_another(rank):
    """Rank 1 asks for a save, rank 2 is told to stop after it was taken."""
    training = Training(coupled=True)
    told = False
    while training.boundary():
        training.micro_batch()
        if rank == 1 and training.gate.passed == 4:
            training.watcher.request_save(1, "best")
        if rank == 2 and training.dues and not told:
            told = True
            terminate_myself()
    return training.leave()


def save_on_all(rank):
    """All ranks call for saves 1 and 2 at the same places, and train a fixed length."""
    training = Training()
    while training.gate.passed < 30:
        training.boundary()
        training.micro_batch()
        if training.gate.passed in (5, 12):
            training.watcher.request_save({5: 1, 12: 2}[training.gate.passed], "all")
    return training.leave()


def one_leaves_early(rank):
    """Rank 0 leaves by an exception; then rank 1 is signalled, and ranks 1 and 2 stop."""
    training = Training()
    if rank == 0:
        for _ in range(3):
            training.boundary()
        training.watcher.publish_final()
        training.watcher.stop()
        training.channel.put("rank 0 has left", True)
        training.channel.get("the others stopped", 30)
        return training.gate.passed
    gone = training.channel.connection()
    while training.boundary():
        training.micro_batch()
        if rank == 1 and training.gate.passed == 1:
            gone.get("rank 0 has left", 30)
            terminate_myself()
    training.watcher.publish_final()
    training.watcher.stop()
    if training.channel.count("stopped") == 2:
        training.channel.put("the others stopped", True)
    return training.dues


def one_does_not_answer(rank):
    """Rank 2 has no watcher, as if it were stuck holding the GIL; the others are told to stop."""
    channel = connect(current_world(), "test/1")
    if rank == 2:
        channel.get("rank 2 may go", 30)
        return "left in peace"
    gate = BoundaryGate()
    sources = [SignalSource()] if rank == 0 else []
    watcher = NoticeWatcher(
        gate,
        channel,
        sources,
        decision_timeout_s=0.5,
        on_failed_stop=lambda _: release(channel),
    )
    watcher.start()
    if rank == 0:
        terminate_myself()
    while gate.at_boundary() is None:
        pass
    return "acted on a stop that failed"


def release(channel):
    """The last rank to end lets the silent one go, then this one ends as it would in earnest."""
    if channel.count("ended") == 2:
        channel.put("rank 2 may go", True)
    os._exit(71)


def brings_its_rank(rank):
    """gather, barrier and propose over the default process group's store."""
    channel = connect(current_world(), "test/1")
    everyone = channel.gather("rank", {"i am": rank}, 30)
    winner = channel.propose("winner", rank)
    channel.barrier("done", 30)
    return everyone, winner


def swap(rank):
    """Three members swap bytes of several lengths, in both directions; some send nothing."""
    exchange = Exchange(connect(current_world(), "test/1"), "one", [0, 1, 2], 30)
    lengths = [0, 1, 4096, 3_000_001]
    for length in lengths:
        for step in (1, 2):
            to, source = (rank + step) % 3, (rank - step) % 3
            mine = length if rank < 2 else 0  # the third has nothing to say
            into = bytearray(length if source < 2 else 0)
            sent = memoryview(bytes([rank]) * mine)
            exchange.settle(exchange.begin([(source, 0, memoryview(into))], [(to, 0, sent)]))
            assert into == bytes([source]) * len(into)
    exchange.close()
    return lengths


def swap_with_one_that_does_not_come(rank):
    """The second is there, and does not take part; what the others get."""
    channel = connect(current_world(), "test/1")
    exchange = Exchange(channel, "one", [0, 1, 2], 30)
    exchange.timeout_s = 0.5
    told = "left in peace"
    if rank == 1:
        channel.get("both have given up", 30)
    else:
        told = _error_of(lambda: _swap_both_ways(exchange, rank))
        if channel.count("given up") == 2:
            channel.put("both have given up", True)
    exchange.close()
    channel.barrier("all leave", 30)
    return told


def meet_without_one(rank):
    """The second never comes."""
    channel = connect(current_world(), "test/1")
    told = "left in peace"
    if rank == 0:
        told = _error_of(lambda: Exchange(channel, "one", [0, 1], 0.5))
    channel.barrier("all leave", 30)
    return told


def _swap_both_ways(exchange, rank):
    for step in (1, 2):
        receives = [((rank - step) % 3, 0, memoryview(bytearray(9)))]
        exchange.settle(exchange.begin(receives, [((rank + step) % 3, 0, memoryview(bytes(9)))]))


def _error_of(call):
    try:
        call()
    except TrainckptError as error:
        return f"{type(error).__name__}: {error.message}"
    return "no error"
