"""Snapshot or process dump: a pure function of measured facts, and its reason for people.

First match wins; whatever comes out, the newest snapshots are flushed first:

    1. no Checkpointer: dump, if the host comes back, nothing forbids a dump, and it fits; else
       nothing
    2. a boundary can be reached before the deadline: snapshot; then a dump on top, if requested and
       under the same conditions
    3. otherwise: dump under these conditions, else nothing; the newest snapshot stands
"""

from __future__ import annotations

from dataclasses import dataclass

SNAPSHOT, DUMP, BOTH, NOTHING = "snapshot", "dump", "both", "nothing"


@dataclass(frozen=True)
class DumpFacts:
    """Facts known at a stop."""

    instrumented: bool  # the ranks have a Checkpointer
    asked: bool = False  # a dump was requested
    seconds_left: float | None = None  # until the deadline; None: there is none
    # until a boundary is reached and its snapshot committed; None: not known
    boundary_s: float | None = None
    dump_s: float = 0.0  # seconds that a dump would take
    hosts: int = 1  # number of hosts with ranks
    host_returns: bool = True  # the host will be there again
    why_no_dump: str = ""  # reason that forbids a dump here, or ""
    why_not_now: str = ""  # reason that forbids a dump of processes not paused at a boundary, or ""


@dataclass(frozen=True)
class DumpChoice:
    """`SNAPSHOT`, `DUMP`, `BOTH` or `NOTHING`, and why: one sentence for people."""

    what: str
    why: str


def choose(facts: DumpFacts) -> DumpChoice:
    """Return the choice. Pure."""
    against = _reason_against(facts, facts.dump_s) or facts.why_not_now
    if not facts.instrumented:
        if against:
            return DumpChoice(NOTHING, f"there is no Checkpointer, and {against}")
        return DumpChoice(DUMP, "the command has no Checkpointer, so its processes are dumped")
    left_s = facts.seconds_left
    # Unknown times count as in time, so a snapshot is tried.
    if left_s is None or facts.boundary_s is None or facts.boundary_s <= left_s:
        when = "" if facts.boundary_s is None else f" in about {facts.boundary_s:.1f} s"
        left = "" if left_s is None else f", {left_s:.1f} s are left"
        why = f"a boundary can be reached and saved{when}{left}"
        if not facts.asked:
            return DumpChoice(SNAPSHOT, why)
        against = _reason_against(facts, (facts.boundary_s or 0.0) + facts.dump_s)
        if against:
            return DumpChoice(SNAPSHOT, f"{why}; no dump on top: {against}")
        return DumpChoice(BOTH, f"{why}; then a dump on top, as asked for")
    late = (
        f"the next boundary is saved in about {facts.boundary_s:.1f} s, and {left_s:.1f} s are left"
    )
    if against:
        return DumpChoice(NOTHING, f"{late}; {against}: what was flushed stands")
    return DumpChoice(DUMP, f"{late}; a dump takes about {facts.dump_s:.1f} s")


def is_too_late(dump_s: float, left_s: float) -> str:
    """Return why a dump would not be in time, or ""."""
    if dump_s <= left_s:
        return ""
    return f"a dump would take about {dump_s:.1f} s of the {max(left_s, 0.0):.1f} s left"


def _reason_against(facts: DumpFacts, needed_s: float) -> str:
    """Return the first reason against a dump that ends after `needed_s`, or ""."""
    if facts.why_no_dump:
        return facts.why_no_dump
    if facts.hosts > 1:
        return f"the ranks run on {facts.hosts} hosts"
    if not facts.host_returns:
        return "no configuration says that this host will come back"
    if facts.seconds_left is not None and needed_s > facts.seconds_left:
        return is_too_late(facts.dump_s, facts.seconds_left - (needed_s - facts.dump_s))
    return ""
