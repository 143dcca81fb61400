"""doctor: what this machine, and a run's place, can do for checkpoints; each cure.

Nothing is left behind: what is tried at the run's place is tried in a folder of doctor's own, which
is removed. A place that does not exist yet is not made; its nearest parent is tried instead.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.cli import (
    doctor_crypto,
    doctor_dumps,
    doctor_speed,
    doctor_store,
    doctor_tiers,
    show,
)
from trainckpt.errors import TierUnavailable, TrainckptError
from trainckpt.lifecycle.places import place, source
from trainckpt.lifecycle.run import heartbeat, machine
from trainckpt.lifecycle.run.machine import Item
from trainckpt.snapshot import attempts, catalog
from trainckpt.tiers import capabilities
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from trainckpt.tiers.capabilities import Capabilities
    from trainckpt.tiers.places import Place

PLACE = "run's place"
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="look at this run's place too")


def execute(arguments: argparse.Namespace) -> int:
    """Print every item; 1 if one that is needed fails."""
    tier = place.open_place(arguments.run) if arguments.run else None
    items = examine(show.size)
    if tier is not None:
        items += _place(tier)
        items += doctor_tiers.examine(tier)
    ok = all(item.ok for item in items if item.needed)
    if arguments.json:
        rows = [{**asdict(item), "cure": "" if item.ok else item.cure} for item in items]
        show.document({"items": rows, "ok": ok})
        return 0 if ok else FAILED
    show.table(("what", "", "found", "cure"), [_row(item) for item in items])
    missing = [item.name for item in items if item.needed and not item.ok]
    print("all that is needed is there" if ok else f"needed, and not there: {', '.join(missing)}")
    return 0 if ok else FAILED


def examine(size: Callable[[int], str]) -> list[Item]:
    """This machine, what can be encrypted on it, and whether processes can be dumped."""
    dumps = [doctor_dumps.examine(), doctor_dumps.examine_gpus()]
    return [*machine.examine(size), *doctor_crypto.examine(), *dumps]


def _row(item: Item) -> tuple[str, ...]:
    verdict = "ok" if item.ok else "FAILS" if item.needed else "lacks"
    return (item.name, verdict, item.value, "" if item.ok else item.cure)


def _place(tier: Place) -> list[Item]:
    """What the run's place can do, and what is there. Every file is gone again."""
    if not isinstance(tier, LocalTier):
        items = doctor_store.examine(tier)
        return [*items, *_run(tier, -1)] if items[0].ok else items
    try:
        folder, tried = doctor_speed.try_directory(tier)
    except (OSError, TierUnavailable) as error:
        why = error.strerror if isinstance(error, OSError) else error.message
        cure = error.hint if isinstance(error, TierUnavailable) else ""
        cure = cure or f"make {tier.url} a directory that this user can read and write"
        return [Item(PLACE, ok=False, value=f"{tier.url}: {why}", cure=cure)]
    found, speed = tried
    new = "" if folder == tier.root else f"; {tier.url} is not there yet"
    where = Item(PLACE, ok=True, value=f"{folder} can be read and written{new}")
    speeds = Item("speed", speed.known, speed.in_words(), "free space there", needed=False)
    return [where, *_abilities(found), speeds, *_run(tier, found.free_bytes)]


def _abilities(found: Capabilities) -> list[Item]:
    elsewhere = "name a run on another file system"
    how = {capabilities.LINK: "by link", capabilities.EXCLUSIVE: "by exclusive creation"}
    tail = "" if found.direct_tail else ", but the file's end cannot be cut"
    return [
        Item("file system", ok=True, value=found.file_system or "not known", needed=False),
        Item("rename", found.rename, "replaces in one act" if found.rename else "does not replace",
             elsewhere),
        Item("create only", bool(found.create_only), how.get(found.create_only, "not possible"),
             elsewhere),
        Item("directory sync", found.folder_sync,
             "works" if found.folder_sync else "a power cut may lose the newest snapshots",
             elsewhere, needed=False),
        Item("flock", found.lock, "works" if found.lock else "does not work",
             "nothing in this version needs it; NFS: mount with locks", needed=False),
        Item("O_DIRECT", found.direct and found.direct_tail,
             f"works{tail}" if found.direct else "does not work",
             "nothing to do: writes go through the page cache", needed=False),
    ]  # fmt: skip


def _run(tier: Place, free_bytes: int) -> list[Item]:
    """The run that is there, if any; and room for its next snapshots."""
    try:
        run = attempts.run_id(tier)
        candidates = source.read_candidates(tier) if run else ()
    except TrainckptError as error:
        return [Item("run", ok=False, value=error.message, cure=error.hint)]
    largest = max((c.manifest.num_bytes for c in candidates if c.manifest), default=0)
    room = free_bytes < 0 or free_bytes >= 2 * largest
    free = show.size(free_bytes) if free_bytes >= 0 else "not known"
    needs = f", the largest snapshot has {show.size(largest)}" if largest else ""
    items = [Item("free space", room, f"{free}{needs}", "free space there, or lower keep_last")]
    if run is None:
        return [*items, Item("run", ok=True, value="none yet", needed=False)]
    items.append(Item("run", ok=True, value=run))
    # A newer attempt that began anew has left older snapshots behind; they are not damaged.
    committed = [
        c for c in candidates if c.reason not in (catalog.NOT_COMMITTED, catalog.ABANDONED)
    ]
    newest = next((c for c in candidates if c.usable), None)
    value = "none yet" if not committed else "none is usable"
    if newest is not None and newest.manifest is not None:
        value = f"{newest.name}, {show.when(newest.manifest.created)}"
    cure = f"trainckpt list {tier.url} says why each is refused"
    items.append(Item("newest snapshot", bool(newest) or not committed, value, cure))
    return [*items, _live(tier)]


def _live(tier: Place) -> Item:
    for number, record in sorted(attempts.read_attempts(tier).items(), reverse=True):
        age = None if record.outcome else heartbeat.age_s(tier, number)
        if age is not None and age < heartbeat.ALIVE_S:
            value = f"attempt {number} is alive, its heartbeat {age:.0f} s old"
            return Item("live attempt", ok=True, value=value, needed=False)
    return Item("live attempt", ok=True, value="none", needed=False)
