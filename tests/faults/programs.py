"""What runs in processes of their own: under limits, as another user, on another file system."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests import warm

NOBODY = 65534


def run(server, program, *arguments, as_nobody=False, timeout_s=100):
    """Run `programs.<program>(*arguments)` in a new process; its result, or (code, stderr)."""
    code = (
        "import json, sys\n"
        "from tests.faults import programs\n"
        + (f"programs.become({NOBODY})\n" if as_nobody else "")
        + f"print(json.dumps(programs.{program}(*json.loads(sys.argv[1]))))"
    )
    words = ["-c", code, json.dumps([str(a) for a in arguments])]
    environment = {**os.environ, "HOME": "/nonexistent"}
    done = warm.run(server, words, timeout=timeout_s, env=environment)
    if done.returncode or not done.stdout:
        return done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def become(user):
    """Be another user from now on, one who may not be able to read the Python library."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        _training(folder, lambda _: None)  # imports all that is ever imported
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def _training(place, act):
    """Twelve saves, one a step; `act(number)` before each. What became of each save."""
    import torch
    from torch import nn

    from trainckpt import Checkpointer, SaveFailed

    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ended, waiting = [], []
    with Checkpointer(place, model=model, optimizer=optimizer, every="never") as ckpt:
        while ckpt.cursor.step < 12 and ckpt.boundary():
            for pending in waiting:
                try:
                    ended.append(pending.wait("durable", 20).snapshot)
                except SaveFailed as error:
                    ended.append(f"failed: {error.message}")
            ckpt._attempt.saver.wait()  # what it pruned is gone too
            act(ckpt.cursor.step)
            waiting = [ckpt.save()]
            while not ckpt._gate.has_open_round():
                pass
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return ended


def on_a_full_disk(place):
    """The disk is filled before save 4, and freed before save 8."""
    place = Path(place)
    filler = place / "filler"

    def act(number):
        if number == 4:
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"x" * 4096)
                except OSError:
                    pass
        if number == 8:
            filler.unlink()

    return _training(place / "run", act)


def under_a_file_size_limit(place):
    """No file may be larger than 20 kB from save 4 to save 8."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def act(number):
        if number in (4, 8):
            limit = 20_000 if number == 4 else hard
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    return _training(place, act)


def in_a_place_turned_read_only(place):
    """The run's folders cannot be written to from save 4 to save 8."""
    folders = [Path(place), Path(place) / "snapshots", Path(place) / "attempts"]

    def act(number):
        if number in (4, 8):
            for folder in folders:
                folder.chmod(0o500 if number == 4 else 0o700)

    return _training(place, act)


def in_a_place_that_vanishes(place):
    """The run's place is not there from save 4 to save 8."""
    away = Path(place).with_name("away")

    def act(number):
        if number == 4:
            Path(place).rename(away)
        if number == 8:
            away.rename(place)

    return _training(place, act)


def in_a_place_that_is_closed(place):
    """The run was made, then its snapshots were closed to this user."""
    from trainckpt import Checkpointer
    from trainckpt.errors import TrainckptError

    _training(place, lambda _: None)
    found = []
    for closed in ("snapshots", "attempts", "", "snapshots/*"):
        paths = list(Path(place).glob(closed)) if "*" in closed else [Path(place) / closed]
        for path in paths:
            path.chmod(0o000)
        try:
            from torch import nn

            Checkpointer(place, model=nn.Linear(100, 100)).resume()
        except TrainckptError as error:
            found.append([error.exit_code, error.message, error.hint])
        for path in paths:
            path.chmod(0o700)
    return found


def begins(place, mode="auto", patience_s=30.0):
    """A Checkpointer that begins, and is left; what the log said. Errors are not caught."""
    import logging

    from torch import nn

    from trainckpt import Checkpointer
    from trainckpt.storage import worker_pool

    worker_pool.ANSWER_WITHIN_S = float(patience_s)  # it came by a command line
    said = []
    handler = logging.Handler()
    handler.emit = lambda line: said.append(line.getMessage())
    logging.getLogger("trainckpt").addHandler(handler)
    logging.getLogger("trainckpt").setLevel(logging.INFO)
    ckpt = Checkpointer(place or None, model=nn.Linear(2, 1))
    ckpt.resume(mode)
    ckpt.close()
    return said
