"""The verdict on a case: exact, same data as announced, refused as promised, or failed.

Of every attempt: no hang; no exit that nothing explains; nobody left behind; it went on from the
newest exact snapshot that was committed when it was launched, unless a fault has damaged that; from
one that survivors of dead ranks have saved only if there is no exact one; and no run with a commit
began at its first step.

Of the run: lines of one place are the same bytes, and all of them and the last state are those of
the reference; or a record has announced the same data, which every epoch then has, each sample
once. At its end neither the run directory nor memory holds anything half written.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

from tests.campaign.check import compared
from tests.campaign.check_reshard import Round, data_ranks, epoch_wrong
from tests.campaign.watch import Scene, place_of
from tests.chaos import faults
from tests.chaos.drive import ORDERLY, REFUSALS
from tests.chaos.faults import CATALOGUE, OLDER, REFUSED, SAME_DATA
from trainckpt.format.names import ATTEMPTS
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.snapshot.attempt_history import read_attempts, run_id
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.snapshot.verify import verify
from trainckpt.storage.local import STALE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.drive import Ended, Play

EXACT, FAILED = "exact", "failed"
SERVERS_OWN = ".rclone_temp_put_"  # of an upload amid which the object server was killed
FIRST_KEPT = 3  # steps, until each has its copy elsewhere
MARK = re.compile(r"same data, not bitwise: ([\w ,]+)")
OURS = ("internal error", "a bug of trainckpt")


def verdict(play: Play, reference: Path) -> tuple[str, str]:
    """The verdict, and what is wrong."""
    permits: set[str] = set()
    wrong = []
    for number, ended in enumerate(play.attempts, 1):
        permits |= {word for name in ended.faults for word in CATALOGUE[name].permits}
        wrong += [f"attempt {number}: {what}" for what in _attempt(play, ended, permits)]
    wrong += [what for n in range(len(play.attempts) - 1) for what in _lost_work(play, n)]
    hit = {name for ended in play.attempts for name in ended.faults}
    if play.room.survivors and any(CATALOGUE[name].ends >= faults.DEATH for name in hit):
        permits.add(SAME_DATA)
    last = play.attempts[-1]
    if wrong:
        return FAILED, "; ".join(wrong)
    if not last.finished:
        refused = not last.attempt_lines and set(last.codes) & set(REFUSALS)
        if refused and REFUSED in permits:
            return REFUSED, ""
        return FAILED, f"the run did not finish: {last.codes} after {len(play.attempts)} attempts"
    wrong += [*left_behind(play), *unsound(play)]
    scene, right = play.scene, Scene(reference, play.room.ranks)
    different = [w for rank in range(play.room.ranks) for w in compared(rank, scene, right)]
    announced = _announced(play)
    word = EXACT
    if different and announced and SAME_DATA in permits:
        word, different = SAME_DATA, list(_data(play, right))
    wrong += different
    if wrong:
        return FAILED, "; ".join(wrong)
    if any(_is_refusal(ended) for ended in play.attempts):
        return REFUSED, ""
    return word, ""


def _is_refusal(ended: Ended) -> bool:
    return not ended.attempt_lines and bool(set(ended.codes) & set(REFUSALS))


def _attempt(play: Play, ended: Ended, permits: set[str]) -> Iterator[str]:
    if ended.hung and not ended.may_hang:
        yield f"hung for {ended.seconds:.0f} s"
        return
    if ended.left_over:
        yield f"processes {ended.left_over} were left over"
    explained = {code for name in ended.faults for code in CATALOGUE[name].ends}
    if ended.ended_by_driver:
        explained |= faults.DEATH | {None}
    if set(ended.codes) & explained & faults.STOP:
        explained |= faults.DEATH  # others follow a rank that no snapshot could save yet
    if _rolled_back(play, ended):
        explained |= {65}
    if explained >= faults.DEATH and not ended.before[1]:
        explained |= {65}  # a stop cannot save without the dead rank, and the run has no snapshot
    for code in set(ended.codes) - set(ORDERLY) - explained:
        yield f"ended with {code}, which {ended.faults or 'nothing'} does not explain"
    if set(ended.codes) <= {75} and not ended.hits:
        yield "stopped, and nobody had asked for it"
    lowered = ended.log.lower()
    yield from (f"says {word!r}" for word in OURS if word in lowered)
    yield from _began(play, ended, permits)


def _rolled_back(play: Play, ended: Ended) -> bool:
    """Whether an earlier fault has damaged what this attempt finds."""
    earlier = play.attempts[: play.attempts.index(ended)]
    return any(REFUSED in CATALOGUE[n].permits for e in earlier for n, _, _ in e.hits)


def _began(play: Play, ended: Ended, permits: set[str]) -> Iterator[str]:
    committed = ended.before[1]
    if not committed or not ended.attempt_lines:
        return
    exact = [snapshot for snapshot in committed if snapshot not in ended.inexact]
    newest = (exact or committed)[-1].place
    place = ended.attempt_lines[0]["resumed_from"]
    if place is None:
        yield f"began at the first step, though {newest} was committed"
    elif (place["step"], place["micro"]) < newest and OLDER not in permits:
        yield f"went on from {place}, though {newest} was committed"


def _announced(play: Play) -> bool:
    return any(MARK.search(ended.log) for ended in play.attempts)


def left_behind(play: Play) -> Iterator[str]:
    """What a finished run has left half written, or in memory."""
    run, foreign = play.places.run, set(play.foreign)
    for file in run.rglob(".tmp-*"):
        if not (
            file.parent in (run, run / ATTEMPTS) and time.time() - file.stat().st_mtime < STALE_S
        ):
            yield f"{file.relative_to(run)} was left behind"  # a later attempt removes those
    for folder in (run / "snapshots").glob("*"):
        ours = folder not in foreign and not any(folder.glob(f"{SERVERS_OWN}*"))
        if ours and not (folder / "manifest.json").exists() and not _is_referred_to(play, folder):
            yield f"snapshots/{folder.name} has no manifest, and was left behind"
    hidden = "disk of dumps full" in play.attempts[-1].faults  # a disk mounted over older ones
    for folder in [f for name in ("images", "opened") for f in run.glob(f"dumps/*/{name}")]:
        if any(folder.iterdir()) and not hidden:
            yield f"{folder.relative_to(run)} was left behind"
    for host in range(play.room.hosts):
        memory = play.stage.memory_of(play.room, host)
        names = sorted(str(f.relative_to(memory)) for f in memory.glob("trainckpt-*/*"))
        if names:
            names += [str(f.relative_to(memory)) for f in memory.glob("trainckpt-*/*/**/*")][:9]
            yield f"shared memory of host {host} still holds {names}"


def _is_referred_to(play: Play, folder: Path) -> bool:
    """Whether newer snapshots refer to each file of this older one."""
    tier = open_run_tier(str(play.places.run))
    found = read_catalog(tier, run_id(tier), read_attempts(tier))
    reached = {file.name for c in found if c.manifest is not None for file in c.manifest.reached}
    return all(f"{folder.name}/{file.name}" in reached for file in folder.iterdir())


def unsound(play: Play) -> Iterator[str]:
    """Every byte of what is committed in the run directory, unless rot was put there."""
    hits = {name for ended in play.attempts for name, _, _ in ended.hits}
    if "bit in the run" in hits:
        return
    tier = open_run_tier(str(play.places.run))
    found = read_catalog(tier, run_id(tier), read_attempts(tier))
    if not any(candidate.usable for candidate in found):
        yield "no snapshot of the finished run is usable"
    for candidate in found:
        if candidate.usable:
            copies = verify(tier, candidate.manifest)
            yield from (f"{candidate.name}/{c.file}: {c.reason}" for c in copies if not c.ok)


def _lost_work(play: Play, number: int) -> Iterator[str]:
    """With saves to memory at each step, who dies alone costs one step at most."""
    ended, after = play.attempts[number], play.attempts[number + 1]
    alone = [name for name, _, _ in ended.hits] in (["SIGKILL"], ["host lost"])
    quiet = all(not e.faults for e in play.attempts[:number]) and not after.faults
    if not (play.room.redundancy != "none" and alone and quiet and after.attempt_lines):
        return
    trained = min(ended.lines) // play.room.settings.accumulate
    place = after.attempt_lines[0]["resumed_from"] or {"step": 0}
    if trained >= FIRST_KEPT and place["step"] < trained - 1:
        yield f"{trained} steps were trained, but the next attempt went on at {place['step']}"


def _data(play: Play, right: Scene) -> Iterator[str]:
    """Each sample of a whole epoch once, of what counts in the end."""
    settings = play.room.settings
    kept: dict[int, dict[tuple[int, int], dict]] = {}
    for rank in data_ranks(settings):
        lines = play.scene.lines(rank)
        expected = {place_of(line): json.loads(line) for line in right.lines(rank)}
        mine: dict[tuple[int, int], dict] = {}
        for ended in play.attempts:
            for begun in ended.attempt_lines:
                place = begun["resumed_from"] or {"step": 0, "micro": 0}
                first = place["step"], place["micro"]
                mine = {p: line for p, line in mine.items() if p < first}
                for line in lines[_at(begun["lines"], rank) :]:
                    mine.setdefault(place_of(line), json.loads(line))
        kept[rank] = expected | mine  # the lost rank may have died before it noted its last
    places = sorted(next(iter(kept.values())))
    most = len(kept) * settings.batch_size - 1
    rounds = [
        Round(
            place,
            next(iter(kept.values()))[place]["epoch"],
            [s for lines in kept.values() for s in lines[place]["samples"]],
            most,
        )
        for place in places
    ]
    for epoch in sorted({one.epoch for one in rounds})[:-1]:
        of_epoch = [one for one in rounds if one.epoch == epoch]
        yield from (f"epoch {epoch}: {w}" for w in epoch_wrong(of_epoch, ended=True))


def _at(lines: list[int], rank: int) -> int:
    return lines[rank] if rank < len(lines) else 0
