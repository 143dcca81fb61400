"""Report the state of a run's tiers, for `list` and `doctor`.

Two look at a store: this command, whose own calls go through or not, and the run, whose attempts
write into their records what their copies meet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.cli import output
from trainckpt.run_directory.tier_config import TIERS, TROUBLE
from trainckpt.storage.base import health_of
from trainckpt.storage.redact import redact_text
from trainckpt.storage.retry import CLOSED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.snapshot.catalog import Candidate

COLUMNS = ("tier", "url", "newest there", "now", "in the run")


@dataclass(frozen=True)
class TierStatus:
    """One tier.

    Attributes:
        name: Its.
        url: Without secrets; None: it is not known.
        breaker: Whether calls of this command went through; None: it is no store.
        newest: Full name of the newest usable snapshot that it holds.
        trouble: What the newest attempt that used it has met: `{"attempt", "breaker", "lags",
            "since"}`; None: nothing, or it is over.
        answers: Whether it did just now.
        why_not: Why it did not.
    """

    name: str
    url: str | None
    breaker: str | None
    newest: str | None
    trouble: dict[str, Any] | None
    answers: bool = True
    why_not: str = ""

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


def statuses(everywhere: RunTiers, candidates: Sequence[Candidate]) -> list[TierStatus]:
    """Return every tier's status, the run's place first."""
    records = everywhere.records
    urls = {
        str(tier.get("name")): redact_text(tier["url"])
        for _, record in sorted(records.items())
        for tier in _recorded_tiers(record)
        if isinstance(tier.get("url"), str)
    }
    rows = []
    for tier in (*everywhere.tiers, *everywhere.empty):
        name, health = tier.name, health_of(tier)
        breaker = health.state if health is not None else None
        newest = next((str(c.name) for c in candidates if c.usable and name in c.tiers), None)
        url, trouble = redact_text(tier.url), trouble_of(records, name)
        rows.append(TierStatus(name, url, breaker, newest, trouble))
    for name, reason in everywhere.silent.items():
        status = TierStatus(name, urls.get(name), None, None, trouble_of(records, name))
        rows.append(replace(status, answers=False, why_not=reason))
    return rows


def trouble_of(records: Mapping[int, AttemptRecord], name: str) -> dict[str, Any] | None:
    """Return the trouble recorded by the newest attempt with this tier, or None."""
    for number, record in sorted(records.items(), reverse=True):
        if all(tier.get("name") != name for tier in _recorded_tiers(record)):
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


def _recorded_tiers(record: AttemptRecord) -> list[dict[str, Any]]:
    facts = record.facts.get(TIERS)
    return [tier for tier in facts if isinstance(tier, dict)] if isinstance(facts, list) else []
