"""Options: each with one default, one TOML key and one variable, read once.

Precedence: the argument, `TRAINCKPT_<NAME>`, `trainckpt.toml` in the working directory, the
default. An unreadable value is refused with the place it came from. An unknown environment variable
that looks like an option's is reported with the option meant.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.metrics_target import MetricsTarget, parse_metrics_target
from trainckpt.errors import START_AGAIN, ConfigurationError
from trainckpt.format.changes import KINDS, Choices, parse_choices
from trainckpt.format.duration import parse_duration
from trainckpt.format.globs import Rename, parse_globs, parse_rename
from trainckpt.snapshot.redundancy import RedundancySpec, parse_redundancy
from trainckpt.storage.redact import redact_text, redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


AUTO = "auto"
LOCAL = "local"  # the run directory, among its tiers
THIS_HOST, THROUGH_TIERS = "host", "tiers"  # reach of the compile caches
MEMORY, PARTNER = "memory", "partner"  # shared memory of this host, and of others
PATIENCE_S = 30.0
NOTICES = ("aws", "gce", "azure", "nvml")  # besides signals, notice files and the wall time
TOML_FILE = "trainckpt.toml"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True)
class Every:
    """Interval of saves without a request: by steps, by seconds, or as measured; else never.

    `tiers`: for slower tiers, by name or URL, the interval of copies, where not every one is
    copied.
    """

    steps: int | None = None
    seconds: float | None = None
    text: str = "never"
    auto: bool = False
    tiers: tuple[tuple[str, Every], ...] = ()

    @property
    def in_full(self) -> str:
        """The interval as it may be typed again."""
        return ", ".join([self.text, *(f"{name}: {each.text}" for name, each in self.tiers)])


@dataclass(frozen=True)
class Budget:
    """Memory that saves may take: a share of what this process may use, or a number of bytes."""

    share: float | None = 0.4
    num_bytes: int | None = None
    text: str = "40 %"


@dataclass(frozen=True)
class Patience:
    """Seconds without a heartbeat after which a rank counts as dead; None: never.

    "auto": where other hosts hold copies or parities, except for saves to memory at every step,
    which lose no more.
    """

    seconds: float | None = None
    auto: bool = False
    text: str = "never"


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        every: "100 steps", "10 min", "auto", or "never" (only at a stop and at the end); and the
            intervals of copies to slower tiers.
        keep_last: Usable snapshots kept; tagged ones are kept besides.
        stop_at: "micro-batch", "window", or "auto" (see `stop.stop_mode`).
        grace: Seconds from a signal until this process is killed; None: unknown.
        wall_time: Seconds from the start of this process until its job ends; None: unlimited.
        accumulate: Micro-batches a window, where it cannot be seen.
        memory_budget: Memory that saves may take.
        on_stop: "exit" raises `Stopped`; "return" ends the loops instead.
        exit_code: Of `Stopped`: saved, start me again.
        resume: "auto", "required" or "never".
        init_from: "RUN[@SNAPSHOT]" whose weights a new run begins with; None: the script's own.
        only: Globs of the tensors that `init_from` loads; none: all.
        rename: Names in the snapshot of `init_from` -> names here; None: the same.
        changed: Choices between the script's values and the snapshot's, where they differ.
        exclude: Globs of the models' tensors that are not saved.
        notices: Further sources of stop notices: "auto", or names, or none.
        requeue: "auto" asks Slurm to queue the job again after a stop by it; "never" does not.
        tiers: Slower tiers for copies of snapshots, nearest first: URLs or directories.
        durable: Name or URL of the tier meant by "durable" in `wait`; None: the last one.
        accept_older: Go on although a tier that does not answer may hold a newer snapshot.
        redundancy: Replicas of each rank's file in the memory of other hosts.
        failure_domain: Name of this host's failure domain, such as a rack; None: the host itself.
        metrics: Where rank 0 publishes metrics of the run; None: nowhere.
        survivors: Save on the ranks left when others die, and when a rank counts as dead.
        memory_every: When to save to memory alone, between saves to the run directory.
        encrypt_to: Recipients of encrypted snapshots, or files of recipients; none: no encryption.
        identity: File with the private key that decrypts snapshots; None: there is none.
        compile_cache: "host": compile caches stay on their host; "tiers": copied through the tiers.
        origins: Option -> source of its value.
    """

    every: Every
    keep_last: int
    stop_at: str
    grace: float | None
    wall_time: float | None
    accumulate: int | None
    memory_budget: Budget
    on_stop: str
    exit_code: int
    resume: str
    init_from: str | None
    only: tuple[str, ...]
    rename: Rename | None
    changed: Choices
    exclude: tuple[str, ...]
    notices: tuple[str, ...]
    requeue: str
    tiers: tuple[str, ...]
    durable: str | None
    accept_older: bool
    redundancy: RedundancySpec
    failure_domain: str | None
    memory_every: Every
    encrypt_to: tuple[str, ...]
    identity: str | None
    compile_cache: str
    survivors: Patience
    metrics: MetricsTarget | None
    origins: Mapping[str, str] = field(default_factory=dict)


def read_options(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Options:
    """Resolve every option.

    Raises:
        ConfigurationError: a value is unreadable; names the option and the source of its value.
    """
    environment = os.environ if environment is None else environment
    file = _read_toml((folder or Path.cwd()) / TOML_FILE)
    values, origins = {}, {}
    for name, (default, parse, wanted) in TABLE.items():
        value, origin = default, "default"
        for candidate, source in (
            (file.get(name), TOML_FILE),
            (environment.get(f"TRAINCKPT_{name.upper()}"), f"TRAINCKPT_{name.upper()}"),
            (arguments.get(name), "argument"),
        ):
            if candidate is not None:
                value, origin = candidate, source
        try:
            values[name] = parse(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise ConfigurationError(
                f"{name}={shown(value)} ({origin}) is not an option", hint=f"use {wanted}"
            ) from None
        origins[name] = origin
    return Options(**values, origins=origins)


def refuse_taken_names(own: Iterable[str], given: Iterable[str]) -> None:
    """Refuse objects of the script under names of the Trainer's own objects.

    Raises:
        ConfigurationError: with the names given twice.
    """
    if taken := sorted({*own} & {*given}):
        raise ConfigurationError(
            f"{', '.join(taken)}: an object of the Trainer is tracked under this name already",
            hint="leave it out, or choose another keyword for an object of your own",
        )


def may_be_option(name: str, value: object) -> bool:
    """Return False for an object to track under the name of an option: such as `metrics`."""
    return name != "metrics" or value is None or isinstance(value, str)


def shown(value: object) -> str:
    """Return a value for a message: on one line, shortened, and without secrets."""
    try:
        return redact_text(redacted(repr(value)))[:200]
    except ValueError:  # a number of too many digits
        return "a number"


def _parse_every(value: Any) -> Every:
    """Parse one interval, or several (with commas or as a table): the run's own, and the tiers'."""
    if isinstance(value, Every):
        return value
    if isinstance(value, dict):
        parts = [(str(name).strip(), str(each)) for name, each in value.items()]
    else:
        found = [part.rpartition(":") for part in str(value).split(",")]
        parts = [(name.strip() if colon else LOCAL, each) for name, colon, each in found]
    intervals = {name: _parse_interval(each) for name, each in parts}
    if len(intervals) < len(parts) or not all(intervals):
        raise ValueError(value)
    own = intervals.pop(LOCAL, None) or _parse_interval(TABLE["every"][0])
    return replace(own, tiers=tuple(intervals.items()))


def _parse_interval(text: str) -> Every:
    text = text.strip()
    if text in ("never", AUTO):
        return Every(text=text, auto=text == AUTO)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
    if match is None:
        raise ValueError(text)
    number, unit = float(match[1]), match[2]
    if unit in ("step", "steps"):
        if number != int(number) or not 1 <= number < 2**63:
            raise ValueError(text)
        return Every(steps=int(number), text=text)
    return Every(seconds=parse_duration(text), text=text)


def _parse_seconds(value: Any) -> float:
    bare = isinstance(value, (int, float)) or str(value).strip().isdecimal()
    return parse_duration(f"{value} s" if bare else str(value))


def _parse_budget(value: Any) -> Budget:
    match = _DURATION.fullmatch(str(value).strip().replace("%", "percent"))
    if match is None or float(match[1]) <= 0:
        raise ValueError(value)
    if match[2] == "percent":
        return Budget(min(float(match[1]) / 100, 1.0), None, str(value))
    return Budget(None, int(float(match[1]) * _BYTES[(match[2] or "b").lower()]), str(value))


def _parse_memory_every(value: Any) -> Every:
    every = _parse_every(value)
    if every.seconds is not None or every.auto or every.tiers:
        raise ValueError(value)
    return every


def _parse_patience(value: Any) -> Patience:
    if isinstance(value, Patience):
        return value
    text = str(value).strip()
    if text in ("never", AUTO):
        return Patience(PATIENCE_S if text == AUTO else None, text == AUTO, text)
    seconds = parse_duration(text)
    if not seconds > 0:
        raise ValueError(text)
    return Patience(seconds, False, text)


def _parse_words(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else [os.fspath(word) for word in value]
    urls = tuple(word.strip() for word in words)
    if not all(urls):
        raise ValueError(value)
    return urls


def _yes_or_no(value: Any) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return known[str(value).strip().lower()]


def _parse_notices(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else list(value)
    names = tuple(str(word).strip() for word in words)
    if names != (AUTO,) and not set(names) <= set(NOTICES):
        raise ValueError(value)
    return names


def _unless_none(parse: Callable[[Any], Any], otherwise: Any = None) -> Callable[[Any], Any]:
    return lambda value: otherwise if value in (None, "", "none") else parse(value)


def _number(least: int, most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value)
        if isinstance(value, bool) or not least <= number <= most:
            raise ValueError(value)
        return number

    return parse


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError(value)
        return str(value)

    return parse


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # raises where a folder above may not be searched
            return {}
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not readable: {error}",
            hint="mend it, or start in another working directory",
        ) from error
    unknown = sorted(values.keys() - TABLE.keys())
    if unknown:
        raise ConfigurationError(
            f"{path} has unknown keys {unknown}", hint=f"known: {', '.join(TABLE)}"
        )
    return values


_text_or_none = _unless_none(lambda value: str(os.fspath(value)))

# name -> default, parser, what to type
TABLE: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "every": (
        "10 min",
        _parse_every,
        '"100 steps", "10 min", "auto" or "never"; of tiers too: "10 steps, s3: 100 steps"',
    ),
    "keep_last": (3, _number(1, 10**6), "a number from 1 on"),
    "stop_at": (
        "auto",
        _one_of("auto", "micro-batch", "window"),
        '"auto", "micro-batch" or "window"',
    ),
    "grace": (None, _unless_none(_parse_seconds), 'a duration such as "30 s", or "none"'),
    "wall_time": (None, _unless_none(_parse_seconds), 'a duration such as "4 h", or "none"'),
    "accumulate": (None, _unless_none(_number(1, 10**9)), "a number of micro-batches, or none"),
    "memory_budget": ("40 %", _parse_budget, 'a share such as "40 %", or a size such as "8 GB"'),
    "on_stop": ("exit", _one_of("exit", "return"), '"exit" or "return"'),
    "exit_code": (START_AGAIN, _number(1, 255), "a number from 1 to 255"),
    "resume": ("auto", _one_of("auto", "required", "never"), '"auto", "required" or "never"'),
    "init_from": (None, _text_or_none, '"RUN" or "RUN@SNAPSHOT", or "none"'),
    "only": (
        None,
        _unless_none(parse_globs, ()),
        'globs of what init_from loads, such as "encoder.*", with commas, or "none"',
    ),
    "rename": (
        None,
        _unless_none(parse_rename),
        'beginnings of names, such as "blocks: encoder", with commas, a function, or "none"',
    ),
    "changed": (
        None,
        _unless_none(parse_choices, ()),
        'such as "learning rate: script", with commas, or "none"; the kinds are '
        + ", ".join(f"{kind} ({', '.join(allowed)})" for kind, allowed in KINDS.items()),
    ),
    "exclude": (
        None,
        _unless_none(parse_globs, ()),
        'globs such as "model/frozen.*", with commas, or "none"',
    ),
    "notices": (
        AUTO,
        _unless_none(_parse_notices, ()),
        '"auto", "none", or of "aws,gce,azure,nvml" those you want',
    ),
    "requeue": (AUTO, _one_of(AUTO, "never"), '"auto" or "never"'),
    "tiers": (
        None,
        _unless_none(_parse_words, ()),
        'directories or URLs with commas, nearest first, or "none"',
    ),
    "durable": (None, _text_or_none, "the name of one of the tiers, or none"),
    "accept_older": (False, _yes_or_no, "true or false"),
    "redundancy": (
        "none",
        lambda value: value if isinstance(value, RedundancySpec) else parse_redundancy(str(value)),
        '"none", "partner", or a code such as "xor:8" or "rs:8+2", with at most 3 parities',
    ),
    "failure_domain": (None, _text_or_none, 'a name such as "rack 7", or "none"'),
    "survivors": (AUTO, _parse_patience, '"auto", "never" or a duration such as "30 s"'),
    "memory_every": ("never", _parse_memory_every, '"1 step", "20 steps" or "never"'),
    "encrypt_to": (
        None,
        _unless_none(_parse_words, ()),
        'recipients, or files of them, with commas, or "none"',
    ),
    "identity": (None, _text_or_none, 'the file that `trainckpt keygen` wrote, or "none"'),
    "compile_cache": (THIS_HOST, _one_of(THIS_HOST, THROUGH_TIERS), '"host" or "tiers"'),
    "metrics": (
        None,
        _unless_none(parse_metrics_target),
        '"textfile:/folder", "http:127.0.0.1:9464", "otlp:http://host:4318" or "none"',
    ),
}

_PREFIX, LIKENESS = "TRAINCKPT_", 0.8
# Read elsewhere, or set for launched processes.
_OTHERS = (
    "ACCEPT_OLDER",
    "CACHE",
    "CAN_DUMP",
    "COMMAND",
    "CRIU",
    "DUMPS",
    "LAUNCHED",
    "MEMORY",
    "PROVE",
    "RESTART",
    "RESUME_AT",
    "RUN",
    "STARTED",
    "SUPERVISOR",
)


def misspelled_variables(environment: Mapping[str, str]) -> list[str]:
    """Return one sentence for each; variables unlike any option are ignored. Pure."""
    known = {name.upper() for name in TABLE} | {*_OTHERS}
    warnings = []
    for variable in sorted(environment):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in known:
            continue
        matches = get_close_matches(name.upper(), sorted(known), n=1, cutoff=LIKENESS)
        if matches:
            warnings.append(f"{variable} is not read: {_PREFIX}{matches[0]} is the option's name")
    return warnings


# ---- the data world: the ranks that see different data, where not every rank does
#
# Under tensor, context or pipeline parallelism several ranks train the same samples. The script
# gives a device mesh, and the names of its dimensions along which the data differs.


@dataclass(frozen=True)
class DataWorld:
    """Dimensions of a mesh along which ranks see different data, and their extents."""

    dims: tuple[str, ...]
    extents: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks that see different data."""
        return prod(self.extents)

    def check(self, name: str, loader: Any) -> None:
        """Refuse a loader whose sampler divides the data among another number of ranks."""
        samplers = (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        )
        for replicas in (getattr(sampler, "num_replicas", None) for sampler in samplers):
            if replicas is not None and replicas != self.size:
                raise ConfigurationError(
                    f"{name} deals its data to {replicas} ranks, but data_dims={self.dims} says "
                    f"that {self.size} see different data",
                    hint=f"make its sampler with num_replicas={self.size} and the rank in those "
                    "dimensions",
                )

    def __str__(self) -> str:
        return f"{self.size} data-parallel ranks ({', '.join(self.dims)})"


def pop_data_world(keywords: dict[str, Any]) -> DataWorld | None:
    """Take `mesh` and `data_dims` out of a Checkpointer's keywords; None where they are not there.

    Raises:
        ConfigurationError: one without the other, or a name that is none of the mesh's.
    """
    mesh, named = keywords.pop("mesh", None), keywords.pop("data_dims", None)
    if mesh is None and named is None:
        return None
    names = getattr(mesh, "mesh_dim_names", None)
    if mesh is None or named is None or not names:
        raise ConfigurationError(
            "mesh and data_dims belong together, and the mesh needs names for its dimensions",
            hint='mesh=init_device_mesh(..., mesh_dim_names=("dp", "tp")), data_dims=("dp",)',
        )
    dims = (named,) if isinstance(named, str) else tuple(named)
    unknown = [name for name in dims if name not in names]
    if unknown or len(set(dims)) != len(dims):
        raise ConfigurationError(
            f"data_dims={dims} are not dimensions of the mesh {tuple(names)}",
            hint="name each dimension along which ranks see different data once",
        )
    return DataWorld(dims, tuple(int(mesh.shape[names.index(name)]) for name in dims))
