"""The examples, run in a process that has torch loaded, and struck where a test wants it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

import trainckpt
from tests.integrations.accelerate_training import be_rank
from tests.integrations.sigterm_at_boundary import strike
from trainckpt.stop import shutdown

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, ACCUMULATE, STRIKE_AT = 3, 3, 4  # one micro-batch into the second window


def flags_of(name, place):
    """The flags that make an example of this name short, with all its files in `place`."""
    flags = ["--run", place / "run", "--trace", place / "trace"]
    if name == "rl_dqn":
        return [*flags, "--steps", 40]  # longer than an episode, so that some end
    flags += ["--steps", STEPS, "--accumulate", ACCUMULATE, "--workers", 0]
    return [*flags, "--logs", place / "logs"] if name == "stream_gpt" else flags


def run(example, place, strike_at=None):
    """One attempt of the example's `main`, its run and its trace in `place`."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    argv = [example.__name__, *flags_of(example.__name__, place)]
    sys.argv = [str(part) for part in argv]
    with Struck(strike_at):
        example.main()


class Struck:
    """For the length of a with statement: SIGTERM after so many micro-batches of the trace.

    Of several ranks the first one gets it.
    """

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __enter__(self):
        import training_trace

        self.kind = training_trace.Trace
        self.attempt, self.micro_batch = self.kind.attempt, self.kind.micro_batch

        def attempt(trace, ckpt):
            self.ckpt = ckpt
            self.attempt(trace, ckpt)

        def micro_batch(trace, *line):
            self.micro_batch(trace, *line)
            self.seen += 1
            if self.seen == self.at:
                strike(self.ckpt, here=trace.rank == 0)

        self.kind.attempt, self.kind.micro_batch = attempt, micro_batch

    def __exit__(self, *_):
        self.kind.attempt, self.kind.micro_batch = self.attempt, self.micro_batch


def on_ranks(rank, world, name, folder):
    """As one of several ranks: to the end, with a stop between, and last a stop that is meant.

    Returns:
        Nothing: the process leaves as a script does that was stopped.
    """
    be_rank(rank, world)
    sys.path.insert(0, str(EXAMPLES))
    example, leave = importlib.import_module(name), shutdown.exit_soon
    run(example, folder / "straight")
    shutdown.exit_soon = lambda *_: None
    try:
        run(example, folder / "stopped", STRIKE_AT)
    except trainckpt.Stopped:
        run(example, folder / "stopped")
    shutdown.exit_soon = leave
    run(example, folder / "left", STRIKE_AT)
