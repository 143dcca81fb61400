"""The loop: mutate an input, run it, keep it if it took a new branch, note what must not be.

Every draw comes from one generator seeded by (seed, parser), so a run can be repeated. Coverage
decides which inputs are kept; how long they took does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
import signal
import sys
import time
import tracemalloc
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from tests.fuzz.mutate import mutated, mutated_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from tests.fuzz.coverage import Coverage

HANG_S = 5.0  # of CPU time, for one input
MEMORY_BYTES = 256 << 20  # that any input may take
SLOW_S = 1.0
KEPT_BYTES = 8192
MOST_BYTES = 64 * 1024
MOST_FINDINGS = 25


class Hang(BaseException):
    """An input took too long; no handler in the code under test catches this."""


@dataclass
class Parser:
    """One entry of the table.

    Attributes:
        run: Takes bytes; returns or raises one of `refusals`. Anything else is a finding.
        seeds: Trees that `spell` makes good inputs of.
        spell: Tree -> bytes; the generator decides on broken seals and the like.
        words: Keys and values that stand in such inputs.
        refusals: What refusing an input looks like.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: list[Any]
    spell: Callable[[Any, Random], bytes]
    words: tuple[str, ...] = ()
    refusals: tuple[type[BaseException], ...] = ()


@dataclass
class Finding:
    """An input that was not refused as it should be, and what happened."""

    parser: str
    what: str
    where: str
    data: bytes

    @property
    def file_name(self) -> str:
        """For the bytes."""
        kind = "".join(c if c.isalnum() else "_" for c in f"{self.what[:30]}_{self.where}")
        return f"{self.parser}-{kind}-{hashlib.sha256(self.data).hexdigest()[:8]}.bin"


@dataclass
class Result:
    """What a run of the loop has found."""

    parser: str
    inputs: int = 0
    seconds: float = 0.0
    outcomes: int = 0
    refused: int = 0
    branches: int = 0
    corpus: int = 0
    peak_mb: float = 0.0
    largest_mb: float = 0.0
    slowest_ms: float = 0.0
    slowest_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


def fuzz(
    parser: Parser, inputs: int, seed: int, coverage: Coverage, note: Callable[[bytes], None]
) -> Result:
    """Run so many inputs; `note` is told each before it runs, in case it takes the process down."""
    rng, result = Random(f"{seed}/{parser.name}"), Result(parser.name)
    corpus, outcomes, known = list(parser.seeds), set[str](), set[str]()
    raw = [parser.spell(seed_, rng) for seed_ in parser.seeds]
    signal.signal(signal.SIGPROF, _hang)
    base_mb = _reset_peak()
    limited = _limit_memory()
    began, said = time.monotonic(), time.monotonic()
    for number in range(inputs):
        tree, data = _next(parser, rng, corpus, raw, number)
        note(data)
        coverage.begin()
        before = time.process_time()
        outcome, finding = run_one(parser, data)
        took = time.process_time() - before
        outcomes.add(outcome)
        result.refused += outcome != "accepted"
        if took * 1e3 > result.slowest_ms:
            result.slowest_ms, result.slowest_bytes = took * 1e3, len(data)
        if finding and finding.what + finding.where not in known:
            known.add(finding.what + finding.where)
            result.findings.append(finding)
        elif finding is None and coverage.is_new() and len(data) <= KEPT_BYTES:
            corpus.append(tree) if tree is not None else raw.append(data)
        result.inputs = number + 1
        if outcome.startswith("Hang") or len(result.findings) >= MOST_FINDINGS:
            break
        if time.monotonic() - said > 5:
            said = time.monotonic()
            print(
                f"fuzz: {parser.name} {number + 1}/{inputs}, {len(corpus) + len(raw)} kept, "
                f"{len(result.findings)} findings",
                file=sys.stderr,
                flush=True,
            )
    result.seconds = round(time.monotonic() - began, 1)
    result.peak_mb = round(max(0.0, _memory_mb("VmHWM") - base_mb), 1)
    resource.setrlimit(resource.RLIMIT_AS, limited)
    result.outcomes, result.branches = len(outcomes), coverage.taken
    result.corpus = len(corpus) + len(raw)
    result.slowest_ms = round(result.slowest_ms, 2)
    result.largest_mb = _largest_mb(parser, corpus, raw, rng)
    return result


def _next(
    parser: Parser, rng: Random, corpus: list[Any], raw: list[bytes], number: int
) -> tuple[Any, bytes]:
    if number < len(parser.seeds):
        return parser.seeds[number], raw[number]
    draw = rng.random()
    at = max(rng.random(), rng.random()) if draw < 0.5 else rng.random()  # newer ones more often
    if draw < 0.93 or not raw:
        tree = mutated(corpus[int(at * len(corpus))], rng, corpus, parser.words)
        data = parser.spell(tree, rng)
        if len(data) > MOST_BYTES and rng.random() < 0.95:
            data, tree = data[: int(rng.random() * 4096)], None
        return tree, data
    return None, mutated_bytes(raw[int(at * len(raw))], rng)


def run_one(parser: Parser, data: bytes) -> tuple[str, Finding | None]:
    """Run one input under the clock; the outcome's name, and a finding if it is one."""
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        parser.run(data)
    except parser.refusals as error:
        return _site(error), None
    except (Exception, Hang) as error:
        what = f"{type(error).__name__}: {str(error)[:80]}"
        kind = what if isinstance(error, AssertionError) else type(error).__name__
        return f"{kind} {_site(error)}", Finding(parser.name, kind, _site(error), data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "accepted", None


def _site(error: BaseException) -> str:
    """Where in the package it was raised; the error's name where that is outside."""
    found, frame = type(error).__name__, error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if "trainckpt" in code.co_filename or "fuzz" in code.co_filename:
            found = f"{Path(code.co_filename).stem}_{code.co_name}_{frame.tb_lineno}"
        frame = frame.tb_next
    return found


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"{HANG_S} s")


def _memory_mb(name: str) -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _reset_peak() -> float:
    """Begin a new measurement of the most memory ever used; what is used now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory_mb("VmRSS")


def _limit_memory() -> tuple[int, int]:
    """Let the process take so much more than it has; the limit as it was."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(_memory_mb("VmSize") * 2**20) + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    return before


def _largest_mb(parser: Parser, corpus: list[Any], raw: list[bytes], rng: Random) -> float:
    """The most that one input that was kept takes, by tracemalloc."""
    largest, sample = 0, [*raw, *(parser.spell(tree, rng) for tree in corpus)]
    tracemalloc.start()
    for data in sample[-500:]:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run_one(parser, data)
        largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return round(largest / 2**20, 3)


def silence() -> None:
    """What the code under test warns of or logs is not looked at."""
    warnings.simplefilter("ignore")
