"""Drives the real agreement along the steps of the model, and compares at each of them.

One thread: main's side is only called where the model says that main need not wait, and where
it says that main waits, the real one is caught at the very moment it would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.explorer.model import NOT_OPENED, Outcome
from tests.explorer.steps import Steps, Verdict
from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice
from trainckpt.ranks import BoundaryGate, Decision, Publication, decide
from trainckpt.ranks.decision import decide_without

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.explorer.model import Setup, State, Step


# Else hardly a round would be decided, and all would be opened before the first boundary.
WEIGHTS = {"fails": 0.02, "opens": 0.15}


class WouldWait(Exception):
    """Main would block here."""


class Shadow:
    """Real agreements, one per rank, that follow a run of the model.

    Attributes:
        compared: What was compared, in words, for counting.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.steps = Steps(setup)
        self.state = setup.first_state()
        self.gates = [_without_waiting(BoundaryGate(clock=lambda: 0.0)) for _ in setup.programs]
        self.publications: list[dict[int, Publication]] = [{} for _ in setup.rounds]
        self.finals: dict[int, Publication] = {}
        self.decisions: dict[int, Decision] = {}
        self.compared: list[str] = []

    def run(self, choose: random.Random) -> list[str]:
        """A whole run, every step chosen at random among all that are possible."""
        while found := self.steps.all(self.state):
            weights = [WEIGHTS.get(step.what.split(" ")[0], 1.0) for step, _ in found]
            step, after = choose.choices(found, weights)[0]
            self._compare_who_waits()
            self._follow(step, after)
            self.state = after
            counts = [gate.passed for gate in self.gates]
            assert counts == [rank.passed for rank in after.ranks], step
        self._compare_who_waits()
        return self.compared

    def _compare_who_waits(self) -> None:
        for r, rank in enumerate(self.state.ranks):
            op = self.setup.programs[r][rank.at]
            at_boundary = rank.phase == "runs" and op.kind == "boundary"
            if at_boundary and self.steps.verdict(self.state, r) is None:
                assert self._waits(r)
                self.compared.append("waits")

    def _waits(self, r: int) -> bool:
        try:
            self._ask(r)
        except WouldWait:
            return True
        return False

    def _ask(self, r: int) -> Decision | None:
        op = self.setup.programs[r][self.state.ranks[r].at]
        return self.gates[r].at_boundary(resumable=op.resumable, window_end=op.window_end)

    def _follow(self, step: Step, after: State) -> None:
        r, k = step.rank, step.round
        if step.what == "opens":
            count = self.gates[r].open_round(k + 1)
            assert count == after.ranks[r].opened[k]
        elif step.what == "sends":
            self._send(r, k)
        elif step.what == "hears":
            self._hear(r, k)
        elif step.what in ("leaves", "raises"):
            count = self.gates[r].finish()
            assert count == after.ranks[r].passed
            self.finals[r] = Publication(0, r, count, can_save=False)
        elif r < 0:
            self._propose(step, after)
        elif step.what.startswith("boundary"):
            self._boundary(r)
        else:
            return  # inside a micro-batch: none of the agreement's business
        self.compared.append(step.what.split(" ")[0])

    def _send(self, r: int, k: int) -> None:
        round_ = self.setup.rounds[k]
        request = round_.requests[r]
        real = None if request is None else Notice("a notice", request.action, request.mode)
        count = self.state.ranks[r].opened[k]
        self.publications[k][r] = Publication(k + 1, r, count, round_.can_save[r], real)

    def _propose(self, step: Step, after: State) -> None:
        k = step.round
        expected = after.decisions[k]
        assert expected is not None
        size = len(self.setup.programs)
        if expected.failed and step.what != "is decided":
            seen = [
                publication
                for publication in self.publications[k].values()
                if publication.notice and publication.notice.action == expected.action == "stop"
            ]
            decision = decide_without(seen, size, k + 1)
        else:
            finals = {r: _for_round(final, k + 1) for r, final in self.finals.items()}
            answers = finals | self.publications[k]
            assert len(answers) == size
            decision = decide(list(answers.values()))
        self.decisions[k] = decision
        if expected.failed:
            assert (decision.notice.action, decision.failed) == (expected.action, True)
            self.compared.append("failure")
        else:
            mine = Outcome(
                decision.notice.action, decision.notice.mode, decision.bound, decision.failed
            )
            assert mine == expected

    def _hear(self, r: int, k: int) -> None:
        decision, gate = self.decisions[k], self.gates[r]
        gate.decided(decision)
        if decision.failed and decision.notice.action == "stop":
            with pytest.raises(NoAgreement):  # no main that lived on could go on
                gate.at_boundary()

    def _boundary(self, r: int) -> None:
        gate = self.gates[r]
        verdict = self.steps.verdict(self.state, r)
        due = self._ask(r)
        if due is None:
            assert verdict == Verdict("pass")
        else:
            assert verdict == Verdict(due.notice.action, due.round - 1)
            if due.notice.action == "save":
                gate.close_round(due.round)
        held = [count != NOT_OPENED for count in self.state.ranks[r].opened]
        assert gate.has_open_round() <= any(held)
        self.compared.append(verdict.what)


def _for_round(final: Publication, round_: int) -> Publication:
    return Publication(round_, final.rank, final.passed, final.can_save)


def _without_waiting(gate: BoundaryGate) -> BoundaryGate:
    def wait_for(ready: Callable[[], bool]) -> None:
        if not ready():
            raise WouldWait

    gate._changed.wait_for = wait_for
    return gate
