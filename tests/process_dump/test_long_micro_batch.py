"""The example, dumped inside a micro-batch far longer than the deadline, and at boundaries."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import s3_servers
from tests.campaign import launch
from tests.campaign.cases import Settings
from tests.process_dump.campaign import wait_for
from tests.process_dump.example import SCRIPT, Example, dumped_at_a_boundary
from tests.start_commands.started import Forks, ended
from trainckpt.cli import dumps
from trainckpt.format.dump import DumpRecord
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history
from trainckpt.storage.shared_memory import ROOT_VARIABLE

HELD_S, DEADLINE_S = 11.0, 10.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory, server):
    """The trace of the run that is never stopped; nobody launches it."""
    straight = Example(tmp_path_factory.mktemp("straight") / "x")
    settings, port = Settings("char_gpt", "ddp", 2, 2, 1, 0.1, 2, 2), launch.free_port()
    variables = [launch.rank_variables(settings, rank, port) for rank in range(2)]
    ranks = Forks(server, str(SCRIPT), straight.flags, straight.folder / "log", variables)
    assert ended(ranks) == [0, 0], ranks.said()
    return straight.trace()


@pytest.fixture
def held(tmp_path):
    """The example inside the long micro-batch, for longer than the deadline is."""
    hold = tmp_path / "hold"
    hold.touch()
    grace = f"{DEADLINE_S:g} s"
    with Example(tmp_path / "held", HOLD=hold, TRAINCKPT_GRACE=grace) as run:
        run.hold = hold
        run.start()
        wait_for(
            lambda: len(list(tmp_path.glob("hold.rank*"))) == 2 or run.process.poll() is not None,
            run,
        )
        assert run.process.poll() is None, run.said()
        time.sleep(HELD_S)  # it lasts longer than any other, so as long again is expected
        yield run


def test_it_is_dumped_and_merges_to_the_reference(criu_here, held, reference):
    """By SIGTERM, with the grace that the run was given: the ranks never hear of it."""
    held.process.terminate()
    assert held.wait() == 75, held.said()
    assert "trainckpt: SIGTERM: dump: the next boundary is saved in about" in held.said()
    assert "s are left; a dump takes about" in held.said()
    first = held.records()[1]
    assert (first.outcome["outcome"], first.outcome["kind"]) == ("stopped", "dump"), first
    assert first.outcome["snapshot"].startswith("dump~1.")
    held.hold.unlink()

    assert held.resume().wait() == 0, held.said()
    assert held.trace() == reference
    second = held.records()[2]
    assert second.parent == first.outcome["snapshot"], held.said()
    assert second.outcome["outcome"] == "finished", second
    assert second.newest_commit.split("~")[1].startswith("2."), "its snapshots are of attempt 2"


@pytest.fixture
def small_shm(tmp_path, monkeypatch):
    """A tmpfs without room for arenas, in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64m,mode=1777"]
    made = subprocess.run(["mount", *options, "tmpfs", folder], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("nothing may be mounted here")
    monkeypatch.setenv(ROOT_VARIABLE, str(folder))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.long
def test_memory_of_the_ranks_own_is_in_the_dump(criu_here, small_shm, held, reference):
    held.process.terminate()
    assert held.wait() == 75, held.said()
    assert held.records()[1].outcome["kind"] == "dump"
    assert "private memory, so no copy outlives the process" in held.said()
    held.hold.unlink()

    assert held.resume().wait() == 0, held.said()
    assert held.trace() == reference


# ---- at a boundary, with loader workers, and a connection to the outside


@contextlib.contextmanager
def its_host(name, path):
    """A dump's record as if it had been taken on another host."""
    before = path.read_bytes()
    record = DumpRecord.load(before, path.name)
    path.write_bytes(replace(record, host=replace(record.host, name=name)).dump())
    yield
    path.write_bytes(before)


def test_a_dump_at_a_boundary_lies_on_top_of_a_snapshot(criu_here, tmp_path, reference, capsys):
    """Brought back; then of one dump the snapshot it relies on is damaged, and one is lost, and has
    an image cut short: `resume` says why, and launches the command again."""
    hold = tmp_path / "hold"
    hold.touch()
    with contextlib.ExitStack() as stack:
        outside = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        port = outside.getsockname()[1]
        run = stack.enter_context(Example(tmp_path / "x", HOLD=hold, OUTSIDE=port))
        run.network = ()  # the one that the port is in
        run.start()
        first = dumped_at_a_boundary(run, hold)
        assert "~1." in first["snapshot"]

        run.resume()
        second = dumped_at_a_boundary(run, hold)
        assert "~2." in second["snapshot"], run.said()  # its snapshots are of attempt 2
        for path in (Path(run.run) / "snapshots" / second["snapshot"]).glob("*.safetensors"):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(bytes(path.stat().st_size // 2))

        run.resume()
        third = dumped_at_a_boundary(run, hold)
        refused = f"no dump is restored: {second['name']} was restored, but"
        assert refused in run.said(), run.said()
        hold.unlink()

        images = Path(run.run) / "dumps" / third["name"] / "images"
        with its_host("elsewhere", images.parent / "dump.json"):
            asked = argparse.Namespace(run=run.run, at=None, nproc=None, dumps=None, tiers=None)
            place = open_directory(run.run)
            assert dumps.restored(place, asked, ([], ".", 2), None) is None
            said = capsys.readouterr().err
            assert f"{third['name']} is not restored: it was taken on elsewhere, this is" in said
        largest = max(images.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        assert run.resume().wait() == 0, run.said()
        assert f"{third['name']} is not restored: the image {largest.name} has" in run.said()
        assert run.trace() == reference
    records = run.records()
    parents = [records[number].parent for number in sorted(records)]
    assert parents[1:3] == [first["name"], second["name"]]
    assert parents[4:] == [third["snapshot"]]
    how = [records[number].outcome["outcome"] for number in sorted(records)]
    assert how == ["stopped", "stopped", "killed", "stopped", "finished"]


def test_uploads_to_an_object_store_wait_for_the_dump_and_its_restore(
    criu_here, tmp_path, reference
):
    """Ranks and their loader workers are dumped without a connection to it."""
    hold = tmp_path / "hold"
    hold.touch()
    with s3_servers.rclone(tmp_path / "store") as server:
        store = {"TRAINCKPT_TIERS": "s3://bucket/run", **server.environment()}
        with Example(tmp_path / "x", HOLD=hold, **store) as run:
            run.network = ()  # the one that the server is in
            run.start()
            dumped_at_a_boundary(run, hold)
            hold.unlink()
            assert run.resume().wait() == 0, run.said()
            assert "restored from a process dump, as attempt 2" in run.said()
        assert run.trace() == reference
        there = tmp_path / "store" / "bucket" / "run" / "snapshots"
        newest = attempt_history.read_attempts(open_directory(run.run))[2].outcome["snapshot"]
        assert (there / newest / "manifest.json").exists()
