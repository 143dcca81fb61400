"""What must be true of every attempt, and of the whole run once it is finished.

Of an attempt: it went on from the newest snapshot that was committed when it was launched; its
lines follow one another from there, on every rank; an orderly stop committed the very place all
ranks had reached, so nothing is trained twice; a rank died of SIGTERM only before it could listen
or after it had finished; nothing hung, and no process was left over.

`trainckpt run` moreover ended with 75 wherever the signal came before the run had finished, in
start-up too; there nothing was trained.

Of the run: lines with the same place are the same bytes, and merged they are the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.campaign import cases
from tests.campaign.one_rank import SUPERVISED
from tests.campaign.watch import Scene, after, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.campaign.cases import Case, Settings
    from tests.campaign.drive import Ended

Place = tuple[int, int]
DIED = -15
IN_TIME = 2  # micro-batches from a signal to the end of the run, for it to become a stop


def check(case: Case, attempts: list[Ended], folder: Path, reference: Path) -> list[str]:
    """Everything that is wrong, one sentence each."""
    scene, right = (Scene(f, case.settings.ranks) for f in (folder, reference))
    wrong = []
    for number, ended in enumerate(attempts, 1):
        wrong += [f"attempt {number}: {w}" for w in _attempt(case, ended, scene)]
    if not attempts[-1].finished:
        return [*wrong, "the run did not finish"]
    wrong += [w for rank in range(case.settings.ranks) for w in compared(rank, scene, right)]
    return wrong


def reached(ended: Ended, scene: Scene, rank: int, accumulate: int) -> Place | None:
    """Where `rank` was when this attempt ended; None if nobody can know."""
    if ended.lines[rank] > ended.before[0][rank]:
        return after(place_of(scene.lines(rank)[ended.lines[rank] - 1]), accumulate)
    return began(ended) if ended.attempt_line else None


def began(ended: Ended) -> Place:
    """Where this attempt went on, by what it said itself."""
    place = (ended.attempt_line or {}).get("resumed_from") or {"step": 0, "micro": 0}
    return place["step"], place["micro"]


def _attempt(case: Case, ended: Ended, scene: Scene) -> Iterator[str]:
    committed = ended.before[2]
    yield from attempt_as_told(case, ended, scene, committed[-1].place if committed else (0, 0))


def attempt_as_told(case: Case, ended: Ended, scene: Scene, first: Place) -> Iterator[str]:
    """What is wrong with an attempt that was to go on from `first`."""
    if ended.hung:
        yield f"hung for {ended.seconds:.0f} s"
    if ended.left_over:
        yield f"processes {ended.left_over} were left over"
    yield from _start(ended, first)
    yield from _lines(case.settings, ended, scene, first)
    yield from _end(case, ended, scene)


def _start(ended: Ended, first: Place) -> Iterator[str]:
    if ended.attempt_line is None:
        return
    if began(ended) != first:
        yield f"went on from {began(ended)}, but {first} was committed"
    found = ended.attempt_line["lines"]  # of the files there were: a missing last one has no entry
    here = len(ended.before[0])  # ranks; there may have been more
    if [*found, *[0] * here][:here] != ended.before[0]:
        yield f"found {ended.attempt_line['lines']} lines, there were {ended.before[0]}"


def _lines(settings: Settings, ended: Ended, scene: Scene, first: Place) -> Iterator[str]:
    """From where the attempt began, each line is the one that follows."""
    for rank in range(settings.ranks):
        place = began(ended) if ended.attempt_line else first
        for line in scene.lines(rank)[ended.before[0][rank] : ended.lines[rank]]:
            if place_of(line) != place:
                yield f"rank {rank} trained {place_of(line)} where {place} was to come"
                return
            place = after(place, settings.accumulate)


def _end(case: Case, ended: Ended, scene: Scene) -> Iterator[str]:
    if ended.outcome == "stopped":
        yield from _stopped(case.settings, ended, scene)
    if ended.shot is None:
        if not ended.finished or set(ended.codes) != {0}:
            yield f"was not stopped, and ended with {ended.codes}, {ended.outcome}"
    elif case.launcher == SUPERVISED:
        yield from _supervised(case.settings, ended, scene)
    elif ended.stop.signal == cases.SIGTERM:
        yield from _terminated(case, ended)


def is_stop(ended: Ended) -> bool:
    """Whether a signal was sent, and the run had not finished before it could be acted on."""
    return ended.shot is not None and not ended.finished


def at_one_place(ended: Ended, scene: Scene, settings: Settings) -> bool:
    """Whether all ranks ended after the same micro-batch, and the newest commit is that place."""
    ranks = range(settings.ranks)
    places = {reached(ended, scene, rank, settings.accumulate) for rank in ranks}
    return places == {ended.committed[-1].place if ended.committed else None}


def _supervised(settings: Settings, ended: Ended, scene: Scene) -> Iterator[str]:
    if ended.finished:
        left = settings.micro_batches - max(
            _trained(scene.lines(rank)[:count], settings)
            for rank, count in enumerate(ended.shot[1].lines)
        )
        if left > IN_TIME or ended.codes != [0]:
            yield f"ended with {ended.codes}, finished, {left} micro-batches after a signal"
        return
    if ended.codes != [75]:
        yield f"trainckpt run ended with {ended.codes} after a signal, {ended.outcome}"
    if ended.outcome is None:
        if ended.lines != ended.before[0] or ended.committed != ended.before[2]:
            yield f"trained or committed in an attempt without an end: {ended.record}"
        if ended.record is not None:
            yield f"the attempt's record does not say how it ended: {ended.record}"
    elif ended.outcome != "stopped":
        yield f"after a signal the record says {ended.record['outcome']}"


def _trained(lines: list[bytes], settings: Settings) -> int:
    """Micro-batches of the run that a rank has trained, by its trace so far."""
    if not lines:
        return 0
    step, micro = place_of(lines[-1])
    return step * settings.accumulate + micro + 1


def _stopped(settings: Settings, ended: Ended, scene: Scene) -> Iterator[str]:
    """All ranks at one place, and that place committed: nothing will be trained twice."""
    places = [reached(ended, scene, rank, settings.accumulate) for rank in range(settings.ranks)]
    newest = ended.committed[-1].place if ended.committed else None
    if set(places) != {newest}:
        yield f"stopped at {places} on its ranks, but {newest} was committed"
    if ended.record["outcome"]["lost_micro_batches"] or not ended.record["outcome"]["snapshot"]:
        yield f"stopped with {ended.record['outcome']}"


def _terminated(case: Case, ended: Ended) -> Iterator[str]:
    """The exit codes after SIGTERM."""
    orderly = {"stopped": 75, "finished": 0}.get(ended.outcome or "")
    if case.launcher == cases.TORCHRUN:
        orderly_codes = ended.outcome in ("stopped", "finished") and ended.codes[0] in (0, 1)
    else:
        orderly_codes = set(ended.codes) == {orderly}
    if orderly_codes:
        return
    if not any(_may_die(case, ended, rank) for rank in _shot_at(case, ended)):
        yield f"every rank was listening, but it ended with {ended.codes}, {ended.outcome}"
    for rank, code in enumerate(ended.codes if case.launcher == cases.FORK else []):
        if code == DIED and not _may_die(case, ended, rank):
            yield f"rank {rank} was listening and died of SIGTERM all the same"


def _shot_at(case: Case, ended: Ended) -> list[int]:
    every = list(range(case.settings.ranks))
    if ended.stop.target != "one":
        return every
    return [int(ended.stop.fraction * case.settings.ranks)]


def _may_die(case: Case, ended: Ended, rank: int) -> bool:
    """True if this rank did not listen yet for all we know, or no longer."""
    before, later = ended.shot
    started = before.lines[rank] > ended.before[0][rank] or (
        rank == 0 and before.attempt_lines > ended.before[1]
    )
    last = case.settings.steps, 0
    trained = later.lines[rank] > ended.before[0][rank] and ended.lines[rank] == later.lines[rank]
    done = trained and ended.committed and ended.committed[-1].place == last
    nothing_to_do = bool(ended.before[2]) and ended.before[2][-1].place == last
    return not started or bool(done) or nothing_to_do


def compared(rank: int, scene: Scene, right: Scene) -> Iterator[str]:
    """What differs between the merged trace and last state of a rank and those of a reference."""
    merged: dict[Place, bytes] = {}
    for number, line in enumerate(scene.lines(rank), 1):
        place = place_of(line)
        if merged.setdefault(place, line) != line:
            yield f"rank {rank}: line {number} differs from an earlier one for {place}"
    ours = b"".join(merged[place] for place in sorted(merged))
    theirs = right.lines(rank)
    if ours != b"".join(theirs):
        expected = {place_of(line): line for line in theirs}
        places = sorted(set(merged) | set(expected))
        first = next(p for p in places if merged.get(p) != expected.get(p))
        yield f"rank {rank}: the merged trace differs from the reference from {first} on"
    if scene.finals()[rank] != right.finals()[rank]:
        yield f"rank {rank}: the final digest differs from the reference"
