"""Runs with little shared memory, a small cgroup, no O_DIRECT, for real:

    unshare -m python -m tests.faults.scarce_resources FOLDER

Each case is a training that is killed once and goes on, in processes forked from this one, which
has imported everything; its mounts are its own. Prints one JSON document: case -> digest of the
end, what was logged, and how each attempt ended.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

from tests.faults import cgroup
from trainckpt import Checkpointer
from trainckpt.storage.shared_memory import ROOT_VARIABLE

STEPS, DIES_AT = 6, 4
FILLS_AT, GROWS_AT = 1, 3  # with others' files; what is tracked
LARGE = 30.0  # MB of parameters
STATE = 3  # times the parameters: AdamW


class Grows:
    """A tracked object that has more to save after a while."""

    def __init__(self, num_bytes: int) -> None:
        self.kept, self._num_bytes = torch.zeros(1, dtype=torch.uint8), num_bytes

    def grow(self) -> None:
        self.kept = torch.full((self._num_bytes,), 7, dtype=torch.uint8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = state["kept"].clone()


def parts(mb: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of so many MB of parameters, the same every time."""
    torch.manual_seed(0)
    width = int((mb * 1e6 / 8) ** 0.5)
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, width))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    model(torch.randn(2, model[0].in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_alone(mb: float) -> str:
    """Three steps without saves; takes as much memory as any number of them."""
    model, optimizer = parts(mb)
    for _ in range(3):
        train_on(model, optimizer)
    return ""


def train(run: str, mb: float, *, dies: bool, fill: Path | None = None, grow: bool = False) -> str:
    """`mb`: of parameters. Digest of the end; SIGKILL to itself where it dies."""
    model, optimizer = parts(mb)
    grows = Grows(int(mb * 2e6))
    tracked = {"model": model, "optimizer": optimizer, "grows": grows}
    with Checkpointer(run, **tracked, every="1 steps") as ckpt:
        while ckpt.cursor.step < STEPS and ckpt.boundary():
            step = ckpt.cursor.step
            if step == FILLS_AT and fill is not None:
                fill_up(fill)
            if step == GROWS_AT and grow:
                grows.grow()
            if step in (DIES_AT - 1, DIES_AT) and dies:
                ckpt._attempt.saver.wait()  # while a save is on its way, no other begins
            if step == DIES_AT and dies:
                os.kill(os.getpid(), signal.SIGKILL)
            train_on(model, optimizer)
    sha = hashlib.sha256(grows.kept.numpy().tobytes())
    state = optimizer.state_dict()["state"]
    for tensor in [*model.parameters(), *(state[i][k] for i in state for k in sorted(state[i]))]:
        sha.update(tensor.detach().numpy().tobytes())
    return sha.hexdigest()


def fill_up(folder: Path) -> None:
    """What others may do at any time."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)


def forked(log: Path, group: cgroup.Group | None, **how: object) -> tuple[int, str]:
    """How an attempt in a process of its own ended (as `Popen.returncode`), and its digest."""
    answer = log.with_suffix(".digest")
    if (pid := os.fork()) == 0:
        code = 1
        try:
            if group is not None:
                group.enter()
            handler = logging.FileHandler(log)
            logging.getLogger("trainckpt").addHandler(handler)
            logging.getLogger("trainckpt").setLevel(logging.DEBUG)
            answer.write_text(train(**how) if "run" in how else train_alone(**how))
            code = 0
        except BaseException:
            log.open("a").write(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, answer.read_text() if answer.exists() else ""


def twice(folder: Path, name: str, group: cgroup.Group | None = None, **how: object) -> dict:
    """Killed once, and to the end."""
    how = {"run": str(folder / name), **how}
    log = folder / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    first = forked(log, group, dies=True, **how)[0]
    last, digest = forked(log, group, dies=False, **how)
    return {"ended": [first, last], "digest": digest, "log": log.read_text()}


def mounted(kind: str, at: str, options: str = "") -> None:
    Path(at).mkdir(parents=True, exist_ok=True)
    more = ["-o", options] if options else []
    subprocess.run(["mount", "-t", kind, *more, kind, at], check=True)


# ---- cases: (folder, MB of parameters) -> result


def straight(folder: Path, mb: float) -> dict:
    os.environ[ROOT_VARIABLE] = "none"
    code, digest = forked(folder / "s.log", None, run=str(folder / "s"), mb=mb, dies=False)
    grown = forked(folder / "g.log", None, run=str(folder / "g"), mb=mb, dies=False, grow=True)
    return {"ended": [code, grown[0]], "digest": digest, "grown": grown[1]}


def small_shm(folder: Path, mb: float) -> dict:
    """64 MB of /dev/shm, all of which is left to loader workers."""
    mounted("tmpfs", "/dev/shm", "size=64m,mode=1777")
    return twice(folder, "small_shm", mb=mb)


def full_shm(folder: Path, mb: float) -> dict:
    """Room for one arena; then others fill it, and then more would be needed."""
    mounted("tmpfs", "/dev/shm", f"size={64 + int(mb * (STATE + 1.5))}m,mode=1777")
    return twice(folder, "full_shm", mb=mb, fill=Path("/dev/shm"), grow=True)


def small_cgroup(folder: Path, mb: float) -> dict:
    """So large that what any process takes does not count.

    40 % of the limit would hold the state once more, beside the training it would not fit.
    """
    mb = max(mb, LARGE)
    mounted("tmpfs", "/dev/shm", "size=8g,mode=1777")
    state = int(mb * 1e6 * STATE)
    with cgroup.made(64 * state) as group:
        forked(folder / "alone.log", group, mb=mb)
        peak = group.peak_bytes
    with cgroup.made(peak + state * 4 // 5) as group:
        assert 0.4 * (peak + state * 4 // 5) > state
        found = twice(folder, "small_cgroup", group, mb=mb)
    os.environ[ROOT_VARIABLE] = "none"
    plain = forked(folder / "plain.log", None, run=str(folder / "plain"), mb=mb, dies=False)
    return {**found, "straight": plain[1]}


def no_direct(folder: Path, mb: float) -> dict:
    """A file system that refuses O_DIRECT when a file is opened."""
    mounted("ramfs", str(folder / "ramfs"))
    return twice(folder, "ramfs/run", mb=mb)


CASES = {f.__name__: f for f in (straight, small_shm, full_shm, small_cgroup, no_direct)}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.scarce_resources", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--megabytes", type=float, default=4.0, help="of parameters (%(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    train_alone(0.1)  # a first step imports as much as all before
    found = {}
    for name in asked.cases or CASES:
        os.environ.pop(ROOT_VARIABLE, None)
        found[name] = CASES[name](asked.folder, asked.megabytes)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
