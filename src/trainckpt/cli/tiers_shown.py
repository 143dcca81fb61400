"""How the tiers of a run stand: for `list` and `doctor`.

Two look at a store: this command, whose own calls go through or not, and the run, whose attempts
write into their records what their copies meet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.cli import show
from trainckpt.lifecycle.places.slower import TIERS, TROUBLE
from trainckpt.lifecycle.run import launch
from trainckpt.tiers.breaker import CLOSED
from trainckpt.tiers.places import health_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.snapshot.catalog import Candidate

COLUMNS = ("tier", "url", "newest there", "now", "in the run")


@dataclass(frozen=True)
class Shown:
    """One tier.

    Attributes:
        name: Its.
        url: Without secrets; None: it is not known.
        answers: Whether it did just now.
        why_not: Why it did not.
        breaker: Whether calls of this command went through; None: it is no store.
        newest: Full name of the newest usable snapshot that it holds.
        trouble: What the newest attempt that used it has met: `{"attempt", "breaker", "lags",
            "since"}`; None: nothing, or it is over.
    """

    name: str
    url: str | None
    answers: bool
    why_not: str
    breaker: str | None
    newest: str | None
    trouble: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """As the command line's JSON has it."""
        return asdict(self)

    def row(self) -> tuple[str, ...]:
        """As its table has it."""
        now = "answers" if self.answers else f"does not answer: {self.why_not}"
        if self.breaker not in (None, CLOSED):
            now += f"; left alone ({self.breaker})"
        return (self.name, self.url or "?", self.newest or "", now, in_words(self.trouble))


def in_words(trouble: Mapping[str, Any] | None) -> str:
    """What an attempt has met; "" if nothing."""
    if trouble is None:
        return ""
    state = "" if trouble["breaker"] == CLOSED else f", left alone ({trouble['breaker']})"
    lags = f", lags behind: {trouble['lags']}" if trouble["lags"] else ""
    return f"attempt {trouble['attempt']}, since {show.when(trouble['since'])}{state}{lags}"


def shown(everywhere: Everywhere, candidates: Sequence[Candidate]) -> list[Shown]:
    """Every tier, the run's place first."""
    urls = _urls(everywhere.records)
    found = [
        Shown(
            tier.name, launch.redact_text(tier.url), answers=True, why_not="",
            breaker=health.state if (health := health_of(tier)) is not None else None,
            newest=_newest(candidates, tier.name),
            trouble=trouble_of(everywhere.records, tier.name),
        )
        for tier in (*everywhere.tiers, *everywhere.empty)
    ]  # fmt: skip
    found += [
        Shown(name, urls.get(name), answers=False, why_not=why, breaker=None, newest=None,
              trouble=trouble_of(everywhere.records, name))
        for name, why in everywhere.silent.items()
    ]  # fmt: skip
    return found


def trouble_of(records: Mapping[int, AttemptRecord], name: str) -> dict[str, Any] | None:
    """What the newest attempt that has this tier says of it, unless nothing is wrong."""
    for number, record in sorted(records.items(), reverse=True):
        told = record.facts.get(TIERS)
        if not isinstance(told, list) or all(t.get("name") != name for t in told if _is_table(t)):
            continue
        table = record.facts.get(TROUBLE)
        found = table.get(name) if isinstance(table, dict) else None
        if not isinstance(found, dict):
            return None
        breaker, lags, since = (found.get(key) for key in ("breaker", "lags", "since"))
        if not isinstance(since, (int, float)) or (breaker == CLOSED and not lags):
            return None
        return {"attempt": number, "breaker": str(breaker), "lags": str(lags), "since": since}
    return None


def _newest(candidates: Sequence[Candidate], tier: str) -> str | None:
    return next((str(c.name) for c in candidates if c.usable and tier in c.tiers), None)


def _urls(records: Mapping[int, AttemptRecord]) -> dict[str, str]:
    """Tier -> its URL, as attempts have recorded it."""
    found: dict[str, str] = {}
    for _, record in sorted(records.items()):
        told = record.facts.get(TIERS)
        for each in told if isinstance(told, list) else ():
            if _is_table(each) and isinstance(each.get("url"), str):
                found[str(each.get("name"))] = launch.redact_text(each["url"])
    return found


def _is_table(value: object) -> bool:
    return isinstance(value, dict)
