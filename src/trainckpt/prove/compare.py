"""Compare the records of an uninterrupted run with those of an interrupted one. Pure.

A record is one line a boundary (a digest of each part of the state) and one line a batch, written
by each rank (recording/recorder.py). The resumed attempts must repeat the straight run's
lines from wherever they went on, and together cover all of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.format.digest import NUM_HEX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path


# ---- names of parts of the state, and which of several to blame first
#
# When a run differs, many parts differ at once: a wrong dropout mask makes wrong gradients, which
# make wrong weights. Causes come before effects here, so the first name is where to look.


# Whom to blame first, where several parts differ at the same boundary.
(
    UNTRACKED,
    ATTRIBUTE,
    DDP,
    ORDER,
    WORKERS,
    RNG,
    LOADER,
    OBJECT,
    BUFFER,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
) = range(12)

_LOADER = r"(?P<loader>loader(?:\.\d+)?)\."
_NAME = r"(\w+(?:\.\d+)?)"
# (pattern of the part's path, how to say it, whom it counts to); the first that matches holds.
_SAID: tuple[tuple[re.Pattern[str], str, int], ...] = tuple(
    (re.compile(pattern), said, blame)
    for pattern, said, blame in (
        (r"(.+), which is not tracked", "{0}, which is not tracked", UNTRACKED),
        (r"plain attributes\.(.+)", "{0}, an attribute that is in no state_dict", ATTRIBUTE),
        (r"plain tensors[/.](.+)", "{0}, a tensor in an attribute", BUFFER),
        (r"(?:own|script) generators\.(.+)", "generator {0}", RNG),
        (r"ddp\.(.+)\.bucket_order", "DDP bucket order of {0}", DDP),
        (r"ddp\.(.+)\.forward_sync", "DDP forward-sync flag of {0}", DDP),
        (_LOADER + r"now\.integers\.(.+)\.(seed|epoch)", "{0} {1}", ORDER),
        (_LOADER + r"now\.generators\.(.+)", "generator of the {0}", ORDER),
        (_LOADER + r"now\.samplers\.(.+?)\.(.+)", "{0}: {1}", ORDER),
        (_LOADER + r"workers\.(\d+)\.own", "generators of the data in worker {0}", WORKERS),
        (_LOADER + r"workers\.(\d+)\.(\w+)", "{1} RNG of worker {0}", WORKERS),
        (_LOADER + r"base_seed", "base seed of the workers", WORKERS),
        (r"rng[./]([\w:]+)", "{0} RNG", RNG),
        (r"epoch head\.main\.(\w+)", "{0} RNG at the head of the epoch", RNG),
        (r"epoch head\.(?:objects|script)\.(.+)", "generator {0} at the head of the epoch", RNG),
        (_LOADER + r"data now\.(.+)", "generator {0}", RNG),
        (_LOADER + r"data before\.(.+)", "generator {0} before the epoch's iterator", LOADER),
        (_LOADER + r"rng_before\.(\w+)", "{0} RNG before the epoch's iterator", LOADER),
        (_LOADER + r"window\.order\.rng\.(\w+)", "{0} RNG before the epoch's iterator", LOADER),
        (_LOADER + r"before\.\w+\.(.+)", "data loader: {0} before the epoch's iterator", LOADER),
        (_LOADER + r"own\.(.+)", "data loader: {0}", LOADER),
        (_LOADER + r"facts\.(.+)", "data loader: {0}", LOADER),
        (_LOADER + r"(.+)", "data loader: {0}", LOADER),
        (r"buffer/(.+)", "buffer {0}", BUFFER),
        (r"gradients/(.+)", "gradient of {0}", GRADIENT),
        (r"parameter/(.+)", "parameter {0}", PARAMETER),
        (_NAME + r"\.groups\.(\d+)\.options\.(.+)", "{0}: {2} of group {1}", OPTIMIZER),
        (_NAME + r"/group(\d+)\.(.+)", "{0}: {2} of group {1}", OPTIMIZER),
        (_NAME + r"/(.+)/([^/]+)", "{0} {2} of {1}", OPTIMIZER),
        (_NAME + r"[./](.+)", "{0}: {1}", OBJECT),
        (r"(.*)", "{0}", OBJECT),
    )
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|-v\d+")
# In the Trainer's log: what its speed_metrics() measures.
_CLOCK = re.compile(
    r"trainer\.state\.log_history\.\d+\.\w+_(?:runtime|(?:samples|steps|tokens)_per_second)"
)
_PROPER = {"numpy": "NumPy", "python": "Python", "torch": "torch"}


def say(part: str) -> str:
    """`rng/torch` -> "torch RNG", `loader.workers.1.numpy` -> "NumPy RNG of worker 1"."""
    return _match(part)[1]


def blame(part: str) -> int:
    """Which kind of state a part is, causes before effects: `UNTRACKED` ... `PARAMETER`."""
    return _match(part)[0]


def blame_order(part: str) -> tuple[int, bool, str]:
    """Sort key: causes before effects, the plain name before "... before the epoch's iterator"."""
    return blame(part), "before" in part, part


def family(part: str) -> str:
    """Return the name that all items of a list share, and all versions of a file.

    `trainer.log.3.seconds` -> "trainer.log.*.seconds", `x.last-v2.ckpt` -> "x.last.ckpt".
    """
    return _NUMBER.sub(lambda match: "" if match[0].startswith("-") else "*", part)


def is_clock(part: str) -> bool:
    """Return True for a time or rate that is known to be one, and decides nothing."""
    return _CLOCK.fullmatch(part) is not None


def _match(part: str) -> tuple[int, str]:
    for pattern, said, blamed in _SAID:
        match = pattern.fullmatch(part)
        if match is not None:
            named = match.groupdict()
            words = match.groups()[len(named) :]
            text = said.format(*(_PROPER.get(word, word) for word in words))
            return blamed, text + _which(named.get("loader", "loader"))
    raise AssertionError(part)


def _without_loader(part: str) -> str:
    """Return what `say` does, without the number of the loader that recorded a generator."""
    said = say(part)
    return said.rpartition(" (loader")[0] or said


def _which(loader: str) -> str:
    return "" if loader == "loader" else f" ({loader})"


# ---- the comparison


# Micro-batches trained; whether the loader's pass is open (the end of one epoch and the beginning
# of the next are two boundaries after equally many); evaluation; "state" or "batch".
Key = tuple[int, bool, int, str]
Record = dict[Key, dict[str, Any]]  # in the order in which it was written
START: Key = (0, False, 0, "state")
_TENSOR = re.compile(rf"(\w+)(\[[\d,]*\]) \w{{{NUM_HEX}}}")  # as the recorder writes it
_EARLIER = ("", " before the epoch's iterator", " at the head of the epoch")
BATCH = "the batch of loader: other samples, or other randomness"


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        rank: The rank on which it shows.
        at: Micro-batches that the rank had trained.
        step, micro: The same place as step and micro-batch of its window.
        parts: What differs there, causes before effects, as people say it.
    """

    rank: int
    at: int
    step: int
    micro: int
    parts: tuple[str, ...]

    def __str__(self) -> str:
        # After a batch, also what the next boundary shows of the loader.
        shown = 2 if self.parts[0].startswith(BATCH) else 1
        more = len(self.parts[shown:])
        others = f" (and {more} other part{'s' if more > 1 else ''})" if more else ""
        place = f"step {self.step} micro-batch {self.micro} on rank {self.rank}"
        return f"differs first at {place}: {'; then '.join(self.parts[:shown])}{others}"


def read_records(folder: Path) -> dict[int, Record]:
    """Rank -> its lines by key. A line cut short by a kill is left out."""
    found = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        record: Record = {}
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            entry = json.loads(line)
            if "batch" in entry:
                record[entry["at"], True, 0, "batch"] = entry
            else:
                evaluation = entry["cursor"]["evaluations"]
                record[entry["at"], entry["in_pass"], evaluation, "state"] = entry
        found[int(path.stem.removeprefix("rank"))] = record
    return found


def unseeded(straight: Mapping[int, Record], first: Mapping[int, Record]) -> frozenset[str]:
    """Random generators that the script never seeded: they differ before anything was trained.

    They are left out of the comparison. If anything is drawn from them, what it makes differs.
    """
    found: set[str] = set()
    for rank, record in first.items():
        mine, theirs = record.get(START), straight.get(rank, {}).get(START)
        if mine and theirs:
            found |= {p for p in mine["parts"] if mine["parts"][p] != theirs["parts"].get(p)}
    return frozenset(part for part in found if blame(part) == RNG)


def unrepeated(straight: Mapping[int, Record], again: Mapping[int, Record]) -> frozenset[str]:
    """Return the families of values that differ between two uninterrupted runs.

    Such as times, rates and paths in a log that a tracked object keeps. Only values of tracked
    objects: tensors, random generators, batches, loaders, models and optimizers decide what is
    trained, and a run that does not repeat those is not deterministic.
    """
    found: set[str] = set()
    for rank, record in again.items():
        for key, entry in record.items():
            other = straight.get(rank, {}).get(key)
            if other is None or "parts" not in entry:
                continue
            mine, theirs = entry["parts"], other["parts"]
            for name in _differing(mine, theirs, ()):
                texts = [parts[name] for parts in (mine, theirs) if name in parts]
                if blame(name) in (ATTRIBUTE, OBJECT) and not any(map(_TENSOR.fullmatch, texts)):
                    found.add(family(name))
    return frozenset(found)


def num_lost(straight: Mapping[int, Record], attempts: Sequence[Mapping[int, Record]]) -> int:
    """Return how many micro-batches of the straight run no attempt came to, on the worst rank."""
    lost = [0]
    for rank, record in straight.items():
        reached = {key[0] for attempt in attempts for key in attempt.get(rank, {})}
        lost.append(len({key[0] for key in record} - reached))
    return max(lost)


def first_difference(
    straight: Mapping[int, Record],
    attempts: Sequence[Mapping[int, Record]],
    leave_out: frozenset[str] = frozenset(),
) -> Difference | None:
    """Return the earliest difference of any attempt from the straight run, or None.

    Args:
        straight, attempts: The records.
        leave_out: Names of random generators, or families of values, that are not compared.
    """
    said = {f"{say(part)}{when}" for part in leave_out for when in _EARLIER} | leave_out
    found = [
        difference
        for attempt in attempts
        for rank, record in attempt.items()
        for difference in _differences(rank, straight.get(rank, {}), record, said)
    ]
    found += list(_uncovered(straight, attempts))
    return min(found, key=lambda d: (d.at, _severity(d), d.rank), default=None)


def boundaries(straight: Mapping[int, Record]) -> list[dict[str, Any]]:
    """Rank 0's training boundaries, in order: the cursor at each."""
    record = straight.get(0, {})
    return [entry["cursor"] for key, entry in record.items() if key[2:] == (0, "state")]


def _differences(
    rank: int, straight: Record, record: Record, ignored: Collection[str]
) -> Iterable[Difference]:
    for key, entry in record.items():
        other = straight.get(key) or _other_pass(key, straight)
        if other is None:
            yield _at(rank, key, entry, straight, ("a micro-batch the straight run does not have",))
            return
        if short := _short_pass(key, straight, record):
            yield _at(rank, key, other, straight, (short,))
            return
        if "batch" not in entry:
            parts = _parts(entry, other, ignored)
        elif entry["batch"] == other["batch"]:
            parts = ()
        else:
            parts = (
                BATCH + _of_which_place(entry["batch"], straight),
                *_why_other_batch(key, straight, record, ignored),
            )
        if parts:
            yield _at(rank, key, entry, straight, parts)
            return


def _other_pass(key: Key, straight: Record) -> dict[str, Any] | None:
    """Return the boundary after equally many micro-batches, where only the pass differs."""
    at, in_pass, evaluation, kind = key
    return straight.get((at, not in_pass, evaluation, kind))


def _short_pass(key: Key, straight: Record, record: Record) -> str:
    """Return the loss of a pass over here that went on in the straight run, if any."""
    at, in_pass, evaluation, kind = key
    if in_pass or evaluation or kind != "state" or key in straight:
        return ""
    inside: Key = (at, True, 0, "state")
    if not (inside in record and inside in straight and (at, True, 0, "batch") in straight):
        return ""  # or it was not restored: then what of the loader differs is named
    ends = [k[0] for k in straight if k[0] > at and k[1:] == (False, 0, "state")]
    until = min(ends, default=max(k[0] for k in straight))
    return f"the pass over the data ends {until - at} micro-batches early: their samples are lost"


def _parts(
    entry: Mapping[str, Any], other: Mapping[str, Any], ignored: Collection[str]
) -> tuple[str, ...]:
    names = _differing(entry["parts"], other["parts"], ignored)
    said = dict.fromkeys(
        say(name) + _how(entry["parts"].get(name), other["parts"].get(name)) for name in names
    )
    if not said and entry["cursor"] != other["cursor"]:
        return (f"the cursor: {entry['cursor']} instead of {other['cursor']}",)
    return tuple(said)


def _differing(
    mine: Mapping[str, str], theirs: Mapping[str, str], ignored: Collection[str]
) -> list[str]:
    """Parts that differ, causes before effects."""
    return sorted(
        (
            name
            for name in mine.keys() | theirs.keys()
            if mine.get(name) != theirs.get(name)
            and not (is_clock(name) or _without_loader(name) in ignored or family(name) in ignored)
        ),
        key=blame_order,
    )


def _how(mine: str | None, theirs: str | None) -> str:
    """Describe the difference, if possible: a missing part, another type, a short value."""
    if mine is None or theirs is None:
        return " (missing)" if mine is None else " (new)"
    tensors = _TENSOR.fullmatch(mine), _TENSOR.fullmatch(theirs)
    if tensors[0] and tensors[1]:
        mine, theirs = ("".join(match.groups()) for match in tensors if match)
        if tensors[0][2] == tensors[1][2]:
            mine, theirs = tensors[0][1], tensors[1][1]
    is_digest = len(mine) == NUM_HEX or len(theirs) == NUM_HEX
    return "" if mine == theirs or is_digest else f" ({mine} instead of {theirs})"


def _of_which_place(batch: str, straight: Record) -> str:
    """Return where the uninterrupted run had this batch, if it had it."""
    for key, entry in straight.items():
        if entry.get("batch") == batch:
            cursor = _cursor(key, entry, straight)
            place = f"step {cursor['step']} micro-batch {cursor['micro']}"
            return f", those of {place} of the uninterrupted run"
    return ""


def _why_other_batch(
    key: Key, straight: Record, record: Record, ignored: Collection[str]
) -> tuple[str, ...]:
    """Return the loader's differences at the next boundary, where they first show."""
    later = [k for k in record if k[0] > key[0] and k[3] == "state" and k in straight]
    for following in later[:1]:
        mine, theirs = record[following]["parts"], straight[following]["parts"]
        names = _differing(mine, theirs, ignored)
        return tuple(
            dict.fromkeys(
                say(name) + _how(mine.get(name), theirs.get(name))
                for name in names
                if blame(name) <= LOADER
                and blame(name) not in (ATTRIBUTE, RNG)  # those follow from other samples
            )
        )
    return ()


def _uncovered(
    straight: Mapping[int, Record], attempts: Sequence[Mapping[int, Record]]
) -> Iterable[Difference]:
    for rank, record in straight.items():
        seen = set().union(*(attempt.get(rank, {}).keys() for attempt in attempts))
        missing = next((key for key in record if key not in seen), None)
        if missing is not None:
            what = ("a micro-batch that no attempt trained: its samples are lost",)
            yield _at(rank, missing, record[missing], record, what)


def _at(
    rank: int, key: Key, entry: Mapping[str, Any], straight: Record, parts: tuple[str, ...]
) -> Difference:
    cursor = _cursor(key, entry, straight)
    return Difference(rank, key[0], cursor["step"], cursor["micro"], parts)


def _cursor(key: Key, entry: Mapping[str, Any], straight: Record) -> Mapping[str, Any]:
    """Return the cursor of an entry; of a batch, that of the boundary at which it was asked for."""
    if "cursor" not in entry:
        states = [other for other in straight.values() if "cursor" in other]
        entry = next((state for state in reversed(states) if state["at"] == key[0]), {})
    return entry.get("cursor") or {"step": -1, "micro": -1}


def _severity(difference: Difference) -> int:
    return int(difference.parts[0].startswith(BATCH))
