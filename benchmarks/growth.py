"""Costs that must not grow with a run: against the snapshots it keeps, and against its attempts.

    python -m benchmarks.growth --json OUT [--png OUT] [--snapshots 10,100,1000]
                                [--attempts 1,10,100] [--places local,s3] [--rounds N]

One rank trains a model of a few KB in this process. A run of each length is prepared: by number of
snapshots, all of one attempt; by number of attempts, with as many snapshots as the shortest run.
Each round takes the runs in turn, in an order that moves on by one. A turn is one more attempt; its
snapshots and its record are removed afterwards. Figures are medians over rounds or saves:

    durable_s    from the request of a save until it is fsynced, or stored
    settled_s    the same until it is recorded and older snapshots are pruned
    start_s      from the constructor of the Checkpointer to the end of the first boundary
    list_s       `trainckpt list`, without the start of the interpreter
    restore_s    `trainckpt.load` of the newest snapshot
    prune_s      `trainckpt prune`, with nothing to delete
    ..._calls    requests to S3, or calls to the directory, of each; of a save until it is settled.
                 Heartbeats and looks for notices come by time and are not counted
    record_bytes size of the newest attempt's record
    keys         keys in the ranks' store after the saves

`s3` is rclone's server on this machine, so a request takes a millisecond or two. The ratios
compare each run with the shortest one, within one round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import torch
from benchmarks import machine
from benchmarks.panels import label_panel, panels
from torch import nn

import trainckpt
from trainckpt import Checkpointer
from trainckpt.cli.main import main as command
from trainckpt.format import manifest as manifests
from trainckpt.format.names import ATTEMPTS, MANIFEST, NOTICES, SNAPSHOTS, SnapshotName
from trainckpt.resume import weight_check
from trainckpt.run_directory.run_url import open_tier_at
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.prune import prune
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.attempt.save_handle import SaveHandle

    Result = TypeVar("Result")

KEEP_LAST = 10**6  # nothing is pruned
SECONDS = ("durable_s", "settled_s", "start_s", "list_s", "restore_s", "prune_s")
CALLS = ("save_calls", "start_calls", "list_calls", "restore_calls", "prune_calls")
FIGURES = (*SECONDS, *CALLS, "record_bytes", "keys")
BY_TIME = (f"{NOTICES}/", ".heartbeat")
TIER_CALLS = ("size", "read", "read_parts", "opened", "list", "write", "write_parts", "replace")
TIER_CALLS += ("create", "remove", "remove_folder")


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    snapshots: int
    attempts: int

    def __str__(self) -> str:
        return f"snapshots-{self.snapshots}-attempts-{self.attempts}"


# ---- the training


class Attempt:
    """One attempt of a run, of a model of a few KB, driven step by step.

    Attributes:
        ckpt: The Checkpointer, past its first boundary.
    """

    def __init__(self, place: str, keep_last: int = KEEP_LAST) -> None:
        torch.manual_seed(0)
        self._model = nn.Linear(16, 16)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-3)
        tracked = {"model": self._model, "optimizer": self._optimizer}
        self.ckpt = Checkpointer(place, **tracked, every="never", keep_last=keep_last)
        self.ckpt.resume()
        self.ckpt.boundary()

    def save(self) -> SaveHandle:
        """Train one step, and save at the boundary after it."""
        self._model(torch.ones(2, 16)).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        pending = self.ckpt.save()
        self.ckpt.boundary()
        return pending

    def settle(self) -> None:
        """Return once the newest save is recorded and older ones are pruned."""
        self.ckpt._attempt.saver.wait()

    def leave(self) -> None:
        """End as a script does that was told to; return when the record is written."""
        self.ckpt.__exit__(SystemExit, SystemExit(75), None)
        for thread in threading.enumerate():
            if thread.name == "trainckpt-record":
                thread.join()


# ---- the runs


def prepare(folder: Path, length: Length) -> None:
    """Make a run of this length: one real snapshot and attempt, and copies under other names."""
    attempt = Attempt(str(folder))
    attempt.save().wait("durable")
    attempt.settle()
    attempt.leave()
    SharedMemoryDir.of(str(folder)).remove()
    tier = LocalTier(folder)
    record = attempt_history.read_attempts(tier)[1]
    (text,) = tier.list(SNAPSHOTS)
    source = SnapshotName.parse(text)
    assert source is not None
    data = (folder / SNAPSHOTS / text / MANIFEST).read_bytes()
    manifest = manifests.load(data, MANIFEST)
    seed = (folder / SNAPSHOTS / text).rename(folder / "seed")
    parent = None
    for number in range(1, length.attempts + 1):  # the snapshots of earlier ones were pruned
        newest = str(replace(source, attempt=number, sequence=length.snapshots))
        outcome = {**(record.outcome or {}), "snapshot": newest}
        own = replace(record, attempt=number, parent=parent, newest_commit=newest, outcome=outcome)
        (folder / ATTEMPTS / f"{number}.json").write_bytes(own.dump())
        parent = newest
    for sequence in range(1, length.snapshots + 1):
        name = replace(source, attempt=length.attempts, sequence=sequence)
        shutil.copytree(seed, folder / name.folder)
        (folder / name.folder / MANIFEST).write_bytes(manifests.dump(replace(manifest, name=name)))
    shutil.rmtree(seed)


# ---- counts


class Calls:
    """Counts what a tier is asked; of this process, on any thread."""

    def __init__(self) -> None:
        self._lock, self._number = threading.Lock(), 0

    def count(self, key: str) -> None:
        """Count one call, unless it comes by time."""
        if not any(part in f"{key}/" for part in BY_TIME):
            with self._lock:
                self._number += 1

    def take(self) -> int:
        """Return the number since the last look."""
        with self._lock:
            number, self._number = self._number, 0
        return number

    @contextlib.contextmanager
    def watched(self, place: str) -> Iterator[None]:
        """Count the requests of every S3 client, or the calls of every `LocalTier`."""
        with contextlib.ExitStack() as stack:
            if place == "s3":
                from aiobotocore.client import AioBaseClient

                request = self._counted_request(AioBaseClient._make_api_call)
                stack.enter_context(mock.patch.object(AioBaseClient, "_make_api_call", request))
            for name in TIER_CALLS if place == "local" else ():
                call = self._counted(getattr(LocalTier, name))
                stack.enter_context(mock.patch.object(LocalTier, name, call))
            yield

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tier: LocalTier, key: str, *more: Any, **keywords: Any) -> Any:
            self.count(key)
            return method(tier, key, *more, **keywords)

        return call

    def _counted_request(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(client: Any, operation: str, parameters: dict[str, Any]) -> Any:
            self.count(str(parameters.get("Key") or parameters.get("Prefix") or ""))
            return await method(client, operation, parameters)

        return call


# ---- turns


class Runs:
    """The runs of one place, and what was measured of them.

    Attributes:
        samples: Length -> figure -> values.
    """

    def __init__(self, urls: dict[Length, str], calls: Calls, saves: int) -> None:
        self._urls, self._calls, self._saves = urls, calls, saves
        self.samples: dict[Length, dict[str, list[float]]] = {
            length: defaultdict(list) for length in urls
        }

    def round(self, number: int) -> None:
        """Take one turn of each run."""
        lengths = list(self._urls)
        first = number % len(lengths)
        for length in lengths[first:] + lengths[:first]:
            self._turn(self._urls[length], self.samples[length])

    def _turn(self, url: str, samples: dict[str, list[float]]) -> None:
        tier = open_tier_at(url)
        before = set(tier.list(SNAPSHOTS))

        def timed(figure: str, call: Callable[[], Result]) -> Result:
            self._calls.take()
            begun_s = time.perf_counter()
            result = call()
            samples[f"{figure}_s"].append(time.perf_counter() - begun_s)
            samples[f"{figure}_calls"].append(self._calls.take())
            return result

        prune_arguments = ["prune", "--json", "--keep-last", str(KEEP_LAST), url]
        timed("list", lambda: run_command(["list", "--json", url]))
        timed("prune", lambda: run_command(prune_arguments))
        timed("restore", lambda: trainckpt.load(url))
        attempt = timed("start", lambda: Attempt(url))
        attempt.save().wait("durable")  # the first one makes its arena, and the store's connections
        attempt.settle()
        for _ in range(self._saves):
            self._calls.take()
            begun_s = time.perf_counter()
            attempt.save().wait("durable")
            samples["durable_s"].append(time.perf_counter() - begun_s)
            attempt.settle()
            samples["settled_s"].append(time.perf_counter() - begun_s)
            samples["save_calls"].append(self._calls.take())
        samples["keys"].append(attempt.ckpt._context.channel.torch_store.num_keys())
        number = attempt.ckpt.attempt
        record = attempt_history.record_key(number)
        samples["record_bytes"].append(tier.size(record) or 0)
        attempt.leave()
        added = [SnapshotName.parse(text) for text in set(tier.list(SNAPSHOTS)) - before]
        prune(tier, [name for name in added if name is not None], ())
        for name in tier.list(ATTEMPTS):
            if name.startswith(f"{number}."):
                tier.remove(f"{ATTEMPTS}/{name}")
        SharedMemoryDir.of(url).remove()


def run_command(arguments: list[str]) -> None:
    """Run a verb in this process, without its output."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = command(arguments)
    if code:
        raise AssertionError(f"{arguments}: {code}")


def measure(place: str, lengths: Sequence[Length], arguments: argparse.Namespace) -> list[Any]:
    """Prepare the runs of one place, measure, and return a row for each."""
    calls = Calls()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.place)))
        bucket = folder / "bucket"
        bucket.mkdir()
        for length in lengths:
            prepare(bucket / str(length), length)
        urls = {length: str(bucket / str(length)) for length in lengths}
        if place == "s3":
            from tests import s3_servers

            server = stack.enter_context(s3_servers.rclone(folder))
            os.environ.update(server.environment())
            urls = {length: f"s3://{s3_servers.BUCKET}/{length}" for length in lengths}
        stack.enter_context(calls.watched(place))
        runs = Runs(urls, calls, arguments.saves)
        for number in range(arguments.rounds):
            begun_s = time.perf_counter()
            runs.round(number)
            print(f"{place}: round {number + 1}: {time.perf_counter() - begun_s:.1f} s", flush=True)
    return [row(place, length, runs.samples) for length in lengths]


# ---- the table and the plot


def row(place: str, length: Length, samples: dict[Length, dict[str, list[float]]]) -> Any:
    """Return the medians of one run, and their ratios to the shortest run's."""
    own, shortest = samples[length], samples[next(iter(samples))]
    found: dict[str, Any] = {"place": place, **vars(length)}
    found |= {figure: round(statistics.median(own[figure]), 6) for figure in FIGURES}
    found["ratios"] = {
        figure: round(
            statistics.median(a / b for a, b in zip(own[figure], shortest[figure], strict=True)), 3
        )
        for figure in FIGURES
    }
    return {**found, "samples": {name: [round(v, 6) for v in own[name]] for name in FIGURES}}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print milliseconds, and counts."""
    times = " ".join(f"{figure.removesuffix('_s'):>8}" for figure in SECONDS)
    counts = " ".join(f"{figure.removesuffix('_calls'):>7}" for figure in CALLS)
    print(f"place  snapshots attempts {times}  ms | calls: {counts} | record  keys")
    for each in rows:
        took = " ".join(f"{each[figure] * 1e3:8.1f}" for figure in SECONDS)
        counts = " ".join(f"{each[figure]:7.0f}" for figure in CALLS)
        print(
            f"{each['place']:6} {each['snapshots']:9} {each['attempts']:8} {took}     |        "
            f"{counts} | {each['record_bytes']:6.0f} {each['keys']:5.0f}"
        )


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a PNG: seconds and calls, against the number of snapshots and of attempts."""
    places = list(dict.fromkeys(each["place"] for each in rows))
    kinds = [(SECONDS, "seconds"), (CALLS, "requests, or calls to the directory")]
    lines = len(places) * 2
    size = 10, 5.6 * len(places)
    with panels(file, lines, 2, dpi=110, figsize=size, sharex="col") as axes:
        for number, place in enumerate(places):
            for column, (axis, other) in enumerate(
                (("snapshots", "attempts"), ("attempts", "snapshots"))
            ):
                of_place = [row for row in rows if row["place"] == place]
                least = of_place[0][other]
                points = sorted((r for r in of_place if r[other] == least), key=lambda r: r[axis])
                for line, (names, label) in enumerate(kinds):
                    panel = axes[2 * number + line][column]
                    x = [point[axis] for point in points]
                    for name in names:
                        y = [point[name] for point in points]
                        panel.plot(x, y, marker="o", markersize=3, label=name)
                    label_panel(panel, f"{place}: {label}", axis)
                    if column == 1:
                        panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))


def main() -> None:
    """Measure every place; print and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="a plot too; needs matplotlib")
    parser.add_argument("--snapshots", default="10,100,1000")
    parser.add_argument("--attempts", default="1,10,100")
    parser.add_argument("--places", default="local,s3")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--saves", type=int, default=3, help="in each turn")
    parser.add_argument("--place", help="folder of a file system for the runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trainckpt").setLevel(logging.ERROR)
    weight_check._STORE_PACE_S = 0.0  # a turn's record is removed after it, and must stay away
    snapshots, attempts = (
        sorted(map(int, text.split(","))) for text in (arguments.snapshots, arguments.attempts)
    )
    lengths = [Length(number, attempts[0]) for number in snapshots]
    lengths += [Length(snapshots[0], number) for number in attempts[1:]]
    rows: list[dict[str, Any]] = []
    for place in arguments.places.split(","):
        rows += measure(place, lengths, arguments)
        if arguments.json is not None:
            words = {"machine": machine.words(), "torch": torch.__version__, "rows": rows}
            arguments.json.write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")
    show(rows)
    if arguments.png is not None:
        draw(rows, arguments.png)


if __name__ == "__main__":
    main()
