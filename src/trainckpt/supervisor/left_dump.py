"""The dump that an attempt ended with, and the slower tiers.

It is copied there once the processes are gone; and when somebody goes on from it they are told.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, SaveFailed, TrainckptError
from trainckpt.lifecycle.dumping import dump_copies
from trainckpt.lifecycle.places.everywhere import open_everywhere
from trainckpt.snapshot import attempts, flush

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.dump import DumpName
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.tiers.base import Tier

SAY_EVERY_S = 5.0


def send_dump(
    everywhere: Everywhere,
    name: DumpName,
    tiers: Sequence[Tier],
    number: int,
    say: Callable[[str], object],
) -> list[str]:
    """Copy a dump of attempt `number`, and note where it is; names of tiers that lack nothing.

    Nothing is lacking either where it must not go.
    """
    held, over = list[str](), list[str]()
    for tier in tiers:
        try:
            held += [tier.name] * _send(everywhere, name, tier, number, say)
        except ConfigurationError as error:
            say(f"{name} is not sent to {tier.name}: {error.message}")
            over.append(tier.name)
        except TrainckptError as error:
            say(f"{name} is not in {tier.name}: {error.message}")
    if held:
        with suppress(TrainckptError):
            _note(everywhere.place, number, str(name), held)
    return [*held, *over]


def tell_who_goes_on(place: Tier, name: DumpName, say: Callable[[str], object]) -> None:
    """Bring the attempts' records to every tier that holds the dump.

    Once the run's place is lost, nothing else says there that it was restored.
    """
    try:
        everywhere = open_everywhere(place.url)
    except TrainckptError as error:
        say(f"the tiers of {place.url} do not hear who goes on from {name}: {error.message}")
        return
    silent = dict(everywhere.silent)
    for tier in everywhere.tiers:
        try:
            if tier is not everywhere.place and tier.size(name.record) is not None:
                flush.mirror_records(everywhere.place, tier, {})
        except TrainckptError as error:
            silent[tier.name] = error.message
    for tier_name, why in silent.items():
        say(f"{tier_name} does not hear who goes on from {name}: {why}")


def _send(
    everywhere: Everywhere, name: DumpName, tier: Tier, number: int, say: Callable[[str], object]
) -> bool:
    place = everywhere.place
    begun_s = said_s = time.monotonic()
    done = 0

    def tell(num_bytes: int) -> None:
        nonlocal done, said_s
        if attempts.newest(place) != number:
            raise SaveFailed("another attempt has begun, and goes on from it")
        done += num_bytes
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"{name} to {tier.name}: {done / 1e6:.1f} MB so far")

    tell(0)
    flush.found_there(place, tier, everywhere.run)
    flush.mirror_records(place, tier, {})
    num_bytes = dump_copies.send(place, tier, everywhere.run, name, tell)
    took_s = time.monotonic() - begun_s
    say(f"{name} is in {tier.name}: {num_bytes / 1e6:.1f} MB in {took_s:.1f} s")
    return True


def _note(place: Tier, number: int, name: str, held: Sequence[str]) -> None:
    """The record says where the dump is."""
    record = attempts.read_attempts(place)[number]
    outcome = record.outcome
    if outcome is not None and outcome.get("snapshot") == name:
        before = [str(tier) for tier in outcome.get("tiers") or ()]
        outcome = {**outcome, "tiers": [*before, *(t for t in held if t not in before)]}
        attempts.replace(place, record.with_(outcome=outcome))
