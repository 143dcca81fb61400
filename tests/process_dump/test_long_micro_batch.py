"""The example in a micro-batch that is far longer than the deadline: dumped, resumed, exact."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.process_dump.campaign import Run, wait_for
from trainckpt.lifecycle.place import open_directory
from trainckpt.snapshot import attempts

SCRIPT = Path(__file__).parent / "held_example.py"
HELD_S, DEADLINE_S = 11.0, 10.0


def flags(folder, **more):
    given = {
        "steps": 6, "accumulate": 2, "parallel": "ddp", "seed": 3, "save-every": 2, "workers": 1,
        "dropout": 0.1, "batch-size": 2, "size": "small", "run": folder / "run",
        "trace": folder / "trace", **more,
    }  # fmt: skip
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


class Example(Run):
    """The example names its run itself."""

    def __init__(self, folder, **variables):
        folder.mkdir()
        super().__init__(folder, script=SCRIPT, **variables)

    def start(self, *options):
        return self._launch(
            "run", *options, "--nproc", "2", "--", str(self.script), *flags(self.folder)
        )

    def trace(self):
        """What the ranks have left of it, the places of each rank merged."""
        found = {}
        for path in sorted((self.folder / "trace").iterdir()):
            if path.name.startswith("rank"):
                for line in path.read_text().splitlines():
                    entry = json.loads(line)
                    place = (path.name, entry["step"], entry["micro"])
                    assert found.setdefault(place, line) == line
            elif path.name.startswith("final"):
                found[path.name] = path.read_text()
        return dict(sorted(found.items(), key=str))

    def records(self):
        return attempts.read_attempts(open_directory(self.run))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The trace of the run that is never stopped."""
    folder = tmp_path_factory.mktemp("straight") / "x"
    with Example(folder) as straight:
        assert straight.start("--dumps", "off").wait() == 0, straight.said()
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
    assert second.parent == first.outcome["snapshot"]
    assert second.outcome["outcome"] == "finished", second
    assert second.newest_commit.split("~")[1].startswith("2."), "its snapshots are of attempt 2"


def test_a_dump_whose_images_are_cut_short_gives_way_to_the_snapshot(criu_here, held, reference):
    """By `pause`; `resume` says why, and launches the command again."""
    done = held.pause("--deadline", f"{DEADLINE_S:g}s")
    assert done.returncode == 0, done.stdout + done.stderr + held.said()
    told = json.loads(done.stdout)
    assert (told["outcome"], told["kind"]) == ("stopped", "dump"), told
    assert told["snapshot"].startswith("dump~1.")
    assert "pause: dump: the next boundary is saved in about" in done.stderr
    assert held.wait() == 75
    held.hold.unlink()
    (images,) = Path(held.run).glob("dumps/*/images")
    largest = max(images.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)

    assert held.resume().wait() == 0, held.said()
    assert f"no dump is restored: {images.parent.name}: the image {largest.name} has" in held.said()
    assert held.trace() == reference
    records = held.records()
    assert records[2].parent == images.parent.name
    assert records[2].outcome["outcome"] == "failed"
    assert records[3].parent == "s2~1.1"
    assert records[3].outcome["outcome"] == "finished"
