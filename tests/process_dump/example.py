"""The example under `trainckpt run`, held inside micro-batches, and dumped at boundaries."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.process_dump.campaign import CLI, LIMIT_S, Run, wait_for
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history

SCRIPT = Path(__file__).parent / "held_example.py"


def words(folder, **more):
    given = {
        "steps": 9,
        "accumulate": 2,
        "parallel": "ddp",
        "seed": 3,
        "save-every": 2,
        "workers": 1,
        "dropout": 0.1,
        "batch-size": 2,
        "size": "small",
        "run": folder / "run",
        "trace": folder / "trace",
        **more,
    }
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


class Example(Run):
    """The example names its run itself."""

    def __init__(self, folder, nproc=2, flags=(), **variables):
        folder.mkdir()
        super().__init__(folder, script=SCRIPT, nproc=nproc, **variables)
        self.flags = words(folder, **dict(flags))

    def start(self, *options):
        nproc = ["--nproc", str(self.nproc)]
        return self._launch("run", *options, *nproc, "--", str(self.script), *self.flags)

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
        return attempt_history.read_attempts(open_directory(self.run))


def dumped_at_a_boundary(run, hold, *, lean=True):
    """Its ranks are held, told to stop, and let go: the dump's record."""
    held = [Path(f"{hold}.rank{rank}") for rank in range(run.nproc)]
    ended = lambda: run.process.poll() is not None  # noqa: E731
    wait_for(lambda: all(path.exists() for path in held) or ended(), run)
    assert not ended(), run.said()
    pause = subprocess.Popen(
        [*CLI, "pause", "--json", run.run, "--dump"],
        env=run.environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: "trainckpt pause: stopping at" in run.said() or pause.poll() is not None, run)
    for path in (hold, *held):
        path.unlink()
    out, err = pause.communicate(timeout=LIMIT_S)
    assert pause.returncode == 0, out + err + run.said()
    assert "pause: both: a boundary can be reached" in err
    told = json.loads(out)
    assert (told["outcome"], told["kind"], told["lost_micro_batches"]) == ("stopped", "dump", 0), (
        told,
        run.said(),
    )
    assert run.wait() == 75
    record = json.loads((Path(run.run) / "dumps" / told["snapshot"] / "dump.json").read_text())
    assert (record["dropped"] > 0) == lean
    hold.touch()
    return record
