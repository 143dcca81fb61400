"""The example with micro-batches of 20 s, a deadline of 8 s: dumped inside one, resumed, compared.

`python -m tests.process_dump.twenty_seconds` takes two minutes, most of them asleep, and prints one
line of JSON. `make test` holds a shorter micro-batch (test_long_micro_batch).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.process_dump.campaign import wait_for
from tests.process_dump.test_long_micro_batch import Example, flags

SCRIPT = Path(__file__).parent / "slow_example.py"
INSIDE_S = 3.0  # of the third micro-batch


class Slow(Example):
    """Four micro-batches."""

    def start(self, *options):
        self.script = SCRIPT
        given = flags(self.folder, steps=2)
        return self._launch("run", *options, "--nproc", "2", "--", str(self.script), *given)


def dumped(folder, micro_batch_s, deadline):
    """Paused inside its third micro-batch and resumed: what `pause` said, and the whole trace."""
    begun = Path(f"{folder}.begun")
    with Slow(folder, EACH_S=micro_batch_s, BEGUN=begun) as run:
        run.start()
        wait_for(lambda: begun.exists() or run.process.poll() is not None, run)
        time.sleep(INSIDE_S)
        asked = time.monotonic()
        done = run.pause("--deadline", deadline)
        took_s = time.monotonic() - asked
        assert done.returncode == 0, done.stdout + done.stderr + run.said()
        assert run.wait() == 75, run.said()
        assert run.resume().wait() == 0, run.said()
        return done.stderr, json.loads(done.stdout), took_s, run.trace()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batch", type=float, default=20.0)
    parser.add_argument("--deadline", default="8s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainckpt-twenty-") as place:
        folder = Path(place)
        with Slow(folder / "straight") as straight:
            assert straight.start("--dumps", "off").wait() == 0, straight.said()
            reference = straight.trace()
        paused = folder / "paused"
        said, told, took_s, trace = dumped(paused, arguments.micro_batch, arguments.deadline)
    print(said.strip())
    print(
        json.dumps(
            {
                "kind": told["kind"],
                "snapshot": told["snapshot"],
                "pause_s": round(took_s, 1),
                "entries": len(trace),
                "exact": trace == reference,
            }
        )
    )


if __name__ == "__main__":
    main()
