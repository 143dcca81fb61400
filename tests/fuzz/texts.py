"""What people and launchers type: durations, names, places, options, variables, commands."""

from __future__ import annotations

import io
import json
import os
from contextlib import nullcontext
from unittest import mock

from tests.fuzz.engine import Parser
from tests.fuzz.mutate import spell
from trainckpt.attempt import launch, options
from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.format.duration import parse_duration
from trainckpt.launcher import torchrun_command
from trainckpt.preemption import wall_time
from trainckpt.ranks.world import current_world
from trainckpt.run_directory import run_url
from trainckpt.stop import deadline
from trainckpt.storage.redact import redact_arguments

MOST_WAIT_S = 9e9  # what threading can wait for
REFUSALS = (TrainckptError,)


def as_json(tree, rng):
    """A tree as JSON."""
    return spell(tree).encode("utf-8", "surrogatepass")


def as_text(tree, rng):
    """A text as itself."""
    return (tree if isinstance(tree, str) else spell(tree)).encode("utf-8", "surrogatepass")


def envelope(data):
    """Several inputs in one: JSON that is not itself under test."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def texts_of(tree):
    """The pairs of texts in a mapping, as an environment has them."""
    pairs = tree.items() if isinstance(tree, dict) else ()
    return {k: v for k, v in pairs if isinstance(v, str) and "\0" not in k + v and "=" not in k}


def text_of(data):
    """Any bytes as a text, surrogates as they come from a command line included."""
    return data.decode("utf-8", "surrogateescape")


def run_duration(data):
    try:
        assert 0 < parse_duration(text_of(data)) < MOST_WAIT_S, "a wait nobody can wait"
    except ValueError as error:  # its documented refusal
        raise TrainckptError(str(error)) from error


def run_names(data):
    text = text_of(data)
    found = names.SnapshotName.parse(text)
    assert found is None or str(found) == text, "two spellings of one name"
    run, snapshot = names.split_target(text)
    assert text == (run if snapshot is None else f"{run}@{snapshot}")
    for check in (names.check_file_name, names.check_tag):
        check(text)


def run_place(data):
    text = text_of(data)
    tier = run_url.open_run_tier(text)
    assert "\0" not in tier.url, "a place nobody can open"


def run_environment(data):
    found = texts_of(envelope(data))
    granted = deadline.granted_s(found)
    assert granted is None or 0 < granted < MOST_WAIT_S, "a wait nobody can wait"
    for option_s in (None, 5.0):
        end = wall_time.wall_time_end(option_s, found, 1e9, 5.0, 1.0)
        assert end is None or end < MOST_WAIT_S * 2, "an end nobody can wait for"
    launch.evidence_of_restart(found)
    launch.missing_supervisor(found)
    launch.describe([("h", 1)], found)
    torchrun_command.take_max_restarts([], found)
    own = {k: v for k, v in found.items() if k in ("LOCAL_RANK", "WORLD_SIZE", "TRAINCKPT_STARTED")}
    if any("\ud800" <= c < "\udc80" or c > "\udcff" for text in own.values() for c in text):
        return  # no environment holds such a text
    with mock.patch.dict(os.environ, own) if own else nullcontext():
        assert 0 <= wall_time.process_start_s() < 1e12
        current_world()


class _Folder:
    """A folder that holds one trainckpt.toml."""

    def __init__(self, text):
        self.text = text

    def __truediv__(self, name):
        return self

    def is_file(self):
        return self.text is not None

    def read_text(self, encoding):
        return self.text.encode("utf-8", "surrogatepass").decode(encoding)

    def open(self, mode):
        return io.BytesIO(self.text.encode("utf-8", "surrogatepass"))


def run_options(data):
    tree = envelope(data)
    tree = tree if isinstance(tree, dict) else {"toml": text_of(data)}
    toml, arguments = tree.get("toml"), tree.get("arguments")
    if isinstance(toml, dict):
        toml = "\n".join(f"{key} = {spell(value)}" for key, value in toml.items())
    found = options.read_options(
        arguments if isinstance(arguments, dict) else {},
        texts_of(tree.get("environment")),
        _Folder(toml if isinstance(toml, str) else None),
    )
    for seconds in (found.grace, found.wall_time, found.every.seconds):
        assert seconds is None or 0 < seconds < MOST_WAIT_S, "a wait nobody can wait"
    assert found.every.steps is None or 1 <= found.every.steps < 2**63
    for name in ("keep_last", "exit_code", "accumulate"):
        assert type(getattr(found, name)) in (int, type(None))


def run_commands(data):
    tree = envelope(data)
    if not isinstance(tree, dict):
        return
    words = tree.get("words")
    words = [w for w in words if isinstance(w, str)] if isinstance(words, list) else []
    redact_arguments(words)
    facts = tree.get("facts")
    if isinstance(facts, dict):
        argv, _, nproc = launch.recorded_command(facts)
        assert all(isinstance(word, str) for word in argv)
        assert nproc >= 1
    kept, restarts = torchrun_command.take_max_restarts(words, {})
    assert restarts >= 0
    torchrun_command.recorded_form(kept, words)


_TOML = {
    "every": "100 steps",
    "keep_last": 3,
    "stop_at": "window",
    "grace": "30 s",
    "wall_time": 3600,
    "accumulate": 2,
    "memory_budget": "8 GB",
    "on_stop": "return",
    "exit_code": 75,
    "resume": "auto",
}
_VARIABLES = {
    "SLURM_JOB_END_TIME": "1000000500",
    "TORCHELASTIC_RUN_ID": "x",
    "LOCAL_WORLD_SIZE": "2",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30",
    "SLURM_RESTART_COUNT": "1",
    "WORLD_SIZE": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "LOCAL_RANK": "0",
    "PET_MAX_RESTARTS": "3",
    "TRAINCKPT_STARTED": "12.5",
    "SLURM_PROCID": "0",
    "AWS_SECRET_KEY": "abc",
    "NCCL_ALGO": "Ring",
}
_ARGV = [
    "python",
    "-u",
    "-m",
    "x",
    "--token=abc",
    "--max-restarts",
    "3",
    "--password",
    "p",
    "https://u:p@h/x",
    "Bearer abcdefghijkl",
]
_WORDS = (
    *_TOML,
    *_TOML["every"].split(),
    "never",
    "10 min",
    "1.5 h",
    "40 %",
    "1e3",
    "tb",
    "d",
    "none",
    "%",
    "[[",
    "]]",
    "=",
    '"""',
    "1979-05-27",
    "0x",
    "steps",
)

PARSERS = {
    "duration": Parser(
        "duration",
        run_duration,
        ["30s", "2 min", "1.5 h", "9999 d"],
        as_text,
        ("s", "min", "h", "d", " ", "1", ".", "sec", "\u0663", "9" * 330),
        REFUSALS,
    ),
    "names": Parser(
        "names",
        run_names,
        ["s1200m3~2.7", "s5~1.1", "runs/x@s5~1.1", "best", "rank0.safetensors"],
        as_text,
        ("~", "s", "m", ".", "@", "/", "latest", "0", "\u0663", "9" * 10),
        REFUSALS,
    ),
    "places": Parser(
        "places",
        run_place,
        ["runs/x", "file:///tmp/x", "~/runs", "s3://b/x"],
        as_text,
        ("~", "~x", "://", "::", "file", "local", "\0", "/", "..", "@"),
        REFUSALS,
    ),
    "environment": Parser(
        "environment",
        run_environment,
        [_VARIABLES, dict(list(_VARIABLES.items())[5:])],
        as_json,
        (*_VARIABLES, "1e400", "-5", "nan"),
        REFUSALS,
    ),
    "options": Parser(
        "options",
        run_options,
        [
            {"toml": _TOML},
            {"toml": 'every = "100 steps"\nkeep_last = 3\n[a]\nb = [[1], {c = 2}]\n'},
            {"environment": {f"TRAINCKPT_{k.upper()}": str(v) for k, v in _TOML.items()}},
            {"arguments": _TOML},
        ],
        as_json,
        _WORDS,
        REFUSALS,
    ),
    "commands": Parser(
        "commands",
        run_commands,
        [
            {"words": _ARGV, "facts": {"argv": _ARGV, "launch": {"kind": "torchrun", "nproc": 2}}},
            {"words": _ARGV[::-1], "facts": {"argv": ["x"], "launch": {"kind": "srun"}}},
        ],
        as_json,
        (*_ARGV, "argv", "launch", "kind", "nproc", "python", "accelerate", "REDACTED"),
        REFUSALS,
    ),
}
