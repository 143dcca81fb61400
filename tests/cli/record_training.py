"""Record the run whose report docs/report.md shows: a real training that is killed and stopped.

    .venv/bin/python -m tests.cli.record_training /home/ada/runs/gpt

A LoRA trains under `trainckpt run`, with a slower tier beside it. Twice a rank is killed, so
that the supervisor starts it again; once the slower tier is away for a while; once the run is
paused, and resumed after a break. It takes about five minutes on two cores.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainckpt.inspect.run_status import read_status
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

ROOT = Path(__file__).parents[2]
SCRIPT = ["examples/lora_gpt.py", "--size", "medium", "--workers", "0"]
SCRIPT += ["--accumulate", "1", "--batch-size", "1"]
STEPS, SAVE_EVERY = 260, 6
KILLS = ((1, 50), (2, 95))  # in attempt, after step
AWAY, BACK, PAUSE, BREAK_S = 120, 145, 175, 20.0


def main(place: str) -> None:
    """Record it."""
    run = Path(place).absolute()
    far = run.with_name("archive")
    environment = {**os.environ, "TRAINCKPT_TIERS": f"{far}/{{run}}", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("trainckpt"))]
    script = [*SCRIPT, "--run", str(run), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    launch = [*command, "run", "--dumps", "off", "--max-restarts", "4", "--", *script]
    running = subprocess.Popen(launch, cwd=ROOT, env=environment)
    for attempt, step in KILLS:
        wait_for(run, attempt, step)
        record = attempt_history.read_attempts(LocalTier(run))[attempt]
        os.kill(record.facts["pids"][0], signal.SIGKILL)
    attempt = KILLS[-1][0] + 1
    wait_for(run, attempt, AWAY)
    far.rename(far.with_name("unplugged"))
    far.write_text("no folder")
    wait_for(run, attempt, BACK)
    far.unlink()
    far.with_name("unplugged").rename(far)
    wait_for(run, attempt, PAUSE)
    subprocess.run([*command, "pause", str(run)], env=environment, check=True)
    running.wait()
    time.sleep(BREAK_S)
    subprocess.run([*command, "resume", str(run)], cwd=ROOT, env=environment, check=True)


def wait_for(run: Path, attempt: int, step: int) -> None:
    """Wait until an attempt has trained a step."""
    while True:
        time.sleep(0.5)
        if (run / "run.json").exists():
            status = read_status(str(run))
            if status.attempt >= attempt and status.reached.steps >= step:
                return


if __name__ == "__main__":
    main(sys.argv[1])
