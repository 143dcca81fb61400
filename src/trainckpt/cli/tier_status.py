"""Report the state of a run's tiers, for `list` and `doctor`.

Two look at a store: this command, whose own calls go through or not, and the run, whose attempts
write into their records what their copies meet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import launch
from trainckpt.cli import output
from trainckpt.run_directory.tier_config import TIERS, TROUBLE
from trainckpt.storage.base import health_of
from trainckpt.storage.retry import CLOSED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.run_directory.run_tiers import RunTiers
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
        """Return it for the JSON output."""
        return asdict(self)

    def row(self) -> tuple[str, ...]:
        """Return its row of the table."""
        state_text = "answers" if self.answers else f"does not answer: {self.why_not}"
        if self.breaker not in (None, CLOSED):
            state_text += f"; left alone ({self.breaker})"
        return (self.name, self.url or "?", self.newest or "", state_text, in_words(self.trouble))


def in_words(trouble: Mapping[str, Any] | None) -> str:
    """Return an attempt's trouble with a tier as text; "" for none."""
    if trouble is None:
        return ""
    state = "" if trouble["breaker"] == CLOSED else f", left alone ({trouble['breaker']})"
    lags = f", lags behind: {trouble['lags']}" if trouble["lags"] else ""
    return f"attempt {trouble['attempt']}, since {output.when(trouble['since'])}{state}{lags}"


def shown(everywhere: RunTiers, candidates: Sequence[Candidate]) -> list[Shown]:
    """Return every tier's status, the run's place first."""
    urls = _urls(everywhere.records)
    rows = [
        Shown(
            tier.name,
            launch.redact_text(tier.url),
            answers=True,
            why_not="",
            breaker=health.state if (health := health_of(tier)) is not None else None,
            newest=_newest(candidates, tier.name),
            trouble=trouble_of(everywhere.records, tier.name),
        )
        for tier in (*everywhere.tiers, *everywhere.empty)
    ]
    rows += [
        Shown(
            name,
            urls.get(name),
            answers=False,
            why_not=reason,
            breaker=None,
            newest=None,
            trouble=trouble_of(everywhere.records, name),
        )
        for name, reason in everywhere.silent.items()
    ]
    return rows


def trouble_of(records: Mapping[int, AttemptRecord], name: str) -> dict[str, Any] | None:
    """Return the trouble recorded by the newest attempt with this tier, or None."""
    for number, record in sorted(records.items(), reverse=True):
        tier_facts = record.facts.get(TIERS)
        if not isinstance(tier_facts, list) or all(
            t.get("name") != name for t in tier_facts if _is_table(t)
        ):
            continue
        table = record.facts.get(TROUBLE)
        trouble = table.get(name) if isinstance(table, dict) else None
        if not isinstance(trouble, dict):
            return None
        breaker, lags, since = (trouble.get(key) for key in ("breaker", "lags", "since"))
        if not isinstance(since, (int, float)) or (breaker == CLOSED and not lags):
            return None
        return {"attempt": number, "breaker": str(breaker), "lags": str(lags), "since": since}
    return None


def _newest(candidates: Sequence[Candidate], tier: str) -> str | None:
    return next((str(c.name) for c in candidates if c.usable and tier in c.tiers), None)


def _urls(records: Mapping[int, AttemptRecord]) -> dict[str, str]:
    """Tier -> its URL, as attempts have recorded it."""
    urls: dict[str, str] = {}
    for _, record in sorted(records.items()):
        tier_facts = record.facts.get(TIERS)
        for tier in tier_facts if isinstance(tier_facts, list) else ():
            if _is_table(tier) and isinstance(tier.get("url"), str):
                urls[str(tier.get("name"))] = launch.redact_text(tier["url"])
    return urls


def _is_table(value: object) -> bool:
    return isinstance(value, dict)
