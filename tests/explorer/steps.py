"""What can happen next: the steps of mains, of watchers, and of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from tests.explorer.model import NOT_OPENED, Op, Outcome, Rank, State, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.explorer.model import Action, Mode, Round, Setup

Next = tuple[Step, State]

GONE = ("stopped", "finished", "left", "ended")  # their watchers are gone too
FREE = ("work", "issue", "collective", "wait")


class Verdict(NamedTuple):
    """What main finds at a boundary where it need not wait."""

    what: Literal["pass", "save", "stop", "end"]
    round: int = -1


class Steps:
    """The steps of one setup."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rules = setup.rules
        self.rounds = range(len(setup.rounds))
        self._all_rounds = (1 << len(setup.rounds)) - 1
        self._takes_part: dict[str, list[tuple[int, int]]] = {}
        self._issues: dict[str, list[tuple[int, int]]] = {}
        for rank, program in enumerate(setup.programs):
            for index, op in enumerate(program):
                if op.kind in ("collective", "commit"):
                    self._takes_part.setdefault(op.name, []).append((rank, index))
                elif op.kind == "issue":
                    self._issues.setdefault(op.name, []).append((rank, index))

    def all(self, state: State) -> list[Next]:
        """Every step that is possible."""
        found = [step for r in range(len(state.ranks)) for step in self.main(state, r)]
        if not self._is_over(state):
            for r in range(len(state.ranks)):
                found += self._watcher(state, r)
            for k in self.rounds:
                found += self.store(state, k)
        return found

    def reduced(self, state: State) -> list[Next]:
        """Some of them, enough to reach every way a run can end.

        Steps that no other step can prevent, and that prevent no other, lead to the same states
        in whatever order they are taken; so the first that is found is taken at once and alone:

          * Main's steps inside a micro-batch. They change only where main is, and that only ever
            lets others go on. The one step they compete with is the end of the process by a
            failed stop; but then the other ranks can do nothing but end by it as well.
          * Sending what was published, and hearing a decision that is not a failed stop: main
            is held from opening the round until it has heard, and both only let others go on.
          * A quiesced rank's opening of a round: its count changes no more. And the opening of a
            round that is skipped already: its count does not matter any more.
          * Once all have answered, what happens in the store to that round: the decision or,
            with timers, "failed". Until then all mains that could matter are held.
          * Main's boundary where this rank has heard of all rounds: nothing can come between.

        What is left, and is tried in every order, is what the protocol is about: a boundary
        passed against a round opened, timers, and failed stops.
        """
        if not self._is_over(state):
            for r, rank in enumerate(state.ranks):
                alone = self._alone(state, r, rank)
                if alone:
                    return alone
            for k in self.rounds:
                if state.decisions[k] is None and self._all_answered(state, k):
                    return list(self.store(state, k))
        return self.all(state)

    def _alone(self, state: State, r: int, rank: Rank) -> list[Next]:
        if rank.phase == "runs":
            op = self.setup.programs[r][rank.at]
            if op.kind in FREE or (op.kind == "boundary" and rank.known == self._all_rounds):
                found = list(self.main(state, r))
                if found:
                    return found
        if rank.phase not in GONE:
            for step in self._watcher(state, r):
                what, _, k = step[0]
                if what in ("sends", "hears") and step[1].ranks[r].phase != "ended":
                    return [step]
                if what == "opens" and (rank.phase == "quiesced" or _is_skip(state.decisions[k])):
                    return [step]
        return []

    # Main.

    def main(self, state: State, r: int) -> Iterator[Next]:
        """What the main thread of rank `r` can do; nothing where it is blocked."""
        rank = state.ranks[r]
        if rank.phase == "quiesced" and self._may_hear_of_the_commit(state):
            yield _with(state, Step("hears of the commit", r), rank._replace(phase="stopped"))
        if rank.phase != "runs":
            return
        op = self.setup.programs[r][rank.at]
        if op.kind == "boundary":
            yield from self._boundary(state, r, rank, op)
        elif op.kind in ("leave", "raise"):
            left = rank._replace(phase="finished" if op.kind == "leave" else "left")
            yield _with(state, Step(f"{op.kind}s", r), left)
        elif self._may_go_on(state, op):
            yield _with(state, Step(f"{op.kind} {op.name}", r), rank._replace(at=rank.at + 1))

    def _may_go_on(self, state: State, op: Op) -> bool:
        if op.kind == "wait":
            return all(state.ranks[q].at > index for q, index in self._issues[op.name])
        if op.kind in ("collective", "commit"):
            return all(_is_there(state.ranks[q], index) for q, index in self._takes_part[op.name])
        return True

    def _boundary(self, state: State, r: int, rank: Rank, op: Op) -> Iterator[Next]:
        verdict = Verdict("pass") if rank.judged else self.verdict(state, r)
        if verdict is None:
            return
        step = Step(f"boundary {op.name}: {verdict.what}", r, verdict.round)
        if verdict.what == "save":
            # The snapshot and close_round in one step: in between watchers can only open rounds
            # and hear decisions, and main looks at those when it comes back to this boundary.
            after = rank._replace(saves=(*rank.saves, (verdict.round, rank.passed)))
        elif verdict.what == "stop":
            after = rank._replace(phase="quiesced")
        elif verdict.what == "end":
            after = rank._replace(phase="ended")
        elif not self.rules.boundary_is_atomic and not rank.judged:
            step, after = Step(f"boundary {op.name}: look", r), rank._replace(judged=True)
        else:
            counts = self.rules.counts_epoch_ends or not op.epoch_end
            after = rank._replace(at=rank.at + 1, passed=rank.passed + counts, judged=False)
        yield _with(state, step, after)

    def verdict(self, state: State, r: int) -> Verdict | None:
        """What main of rank `r` finds at its boundary; None: it waits."""
        rank = state.ranks[r]
        taken = {k for k, _ in rank.saves}
        held = [k for k in self.rounds if rank.opened[k] != NOT_OPENED and k not in taken]
        heard = [k for k in held if rank.known >> k & 1]
        if len(heard) < len(held) and self.rules.waits_for_decision:
            return None
        decided = {k: state.decisions[k] for k in heard if not rank.gave_up >> k & 1}
        stops = [k for k, outcome in decided.items() if outcome and outcome.action == "stop"]
        if any(decided[k].failed for k in stops):
            return Verdict("end")
        due = [k for k in decided if not decided[k].failed and rank.passed + 1 > decided[k].bound]
        op = self.setup.programs[r][rank.at]
        if not op.resumable:
            return Verdict("pass")
        for k in due:
            if decided[k].action == "save" and self._is_still_wanted(k, stops):
                return Verdict("save", k)
        newest_is_due = stops and stops[-1] in due  # it replaces the older ones
        modes = [decided[k].mode for k in stops]
        if newest_is_due and (op.window_end or self._mode(r, stops, modes) == "micro-batch"):
            return Verdict("stop", stops[-1])
        return Verdict("pass")

    def _mode(self, r: int, stops: list[int], modes: list[Mode]) -> Mode:
        """Of all stops that are known the strictest, so that a later one never loosens it."""
        own = self.setup.rounds[stops[-1]].requests[r]
        if own is not None and not self.rules.mode_of_decision:
            return own.mode
        if self.rules.strictest_stop_stands and "micro-batch" in modes:
            return "micro-batch"
        return modes[-1]

    def _is_still_wanted(self, save: int, stops: list[int]) -> bool:
        if not stops or self.rules.saves_beside_a_stop == "all":
            return True
        return self.rules.saves_beside_a_stop == "older" and save < stops[0]

    # Watchers.

    def _watcher(self, state: State, r: int) -> Iterator[Next]:
        rank = state.ranks[r]
        if rank.phase in GONE or rank.sent == rank.known == self._all_rounds:
            return
        for k in self.rounds:
            if rank.opened[k] == NOT_OPENED:
                if self._has_reason_to_open(state, r, k):
                    opened = (*rank.opened[:k], rank.passed, *rank.opened[k + 1 :])
                    yield _with(state, Step("opens", r, k), rank._replace(opened=opened))
                break  # rounds are opened in their order
            if not rank.sent >> k & 1:
                yield _with(state, Step("sends", r, k), rank._replace(sent=rank.sent | 1 << k))
                break  # and published in it
        for k in self.rounds:
            if rank.opened[k] != NOT_OPENED and not rank.known >> k & 1:
                yield from self._hears(state, r, k)

    def _has_reason_to_open(self, state: State, r: int, k: int) -> bool:
        """A notice of its own, at any moment, or the bell of a rank that had one."""
        requests = self.setup.rounds[k].requests
        return requests[r] is not None or any(
            rank.sent >> k & 1 and requests[q] is not None for q, rank in enumerate(state.ranks)
        )

    def _hears(self, state: State, r: int, k: int) -> Iterator[Next]:
        rank, outcome = state.ranks[r], state.decisions[k]
        known = rank._replace(known=rank.known | 1 << k)
        if outcome is not None:
            is_fatal = outcome.failed and outcome.action == "stop"
            if is_fatal and self.rules.failed_stop_ends_process:
                known = known._replace(phase="ended")
            yield _with(state, Step("hears", r, k), known)
        if self.setup.timers and not self.rules.one_decision:
            request = next(
                request for request in self.setup.rounds[k].requests if request is not None
            )
            after = known._replace(gave_up=rank.gave_up | 1 << k)
            if request.action == "stop":
                after = after._replace(phase="ended")
            yield _with(state, Step("gives up by its own timer", r, k), after)

    # The store.

    def store(self, state: State, k: int) -> Iterator[Next]:
        """Proposals for round `k`, of whichever watcher; the first one stands."""
        if state.decisions[k] is not None:
            return
        alive = [rank for rank in state.ranks if rank.phase not in GONE]
        if alive and self._all_answered(state, k):
            yield self._proposed(state, k, "is decided", self.decide(state, k))
        is_open = any(rank.opened[k] != NOT_OPENED for rank in alive)
        if is_open and self.setup.timers and self.rules.one_decision:
            for action in self._actions_of_failure(state, k, self.setup.rounds[k]):
                failed = Outcome(action, "micro-batch", 0, failed=True)
                yield self._proposed(state, k, f"fails as a {action}", failed)

    def _actions_of_failure(self, state: State, k: int, round_: Round) -> list[Action]:
        """What was asked for as far as the proposer saw; a save if it saw no publication."""
        seen: set[Action] = {"save"}
        for q, rank in enumerate(state.ranks):
            request = round_.requests[q]
            if request is not None and rank.sent >> k & 1:
                seen.add(request.action)
        return sorted(seen)

    def _all_answered(self, state: State, k: int) -> bool:
        if not any(rank.sent >> k & 1 for rank in state.ranks):
            return False
        return all(rank.sent >> k & 1 or self._has_left(rank) for rank in state.ranks)

    def _has_left(self, rank: Rank) -> bool:
        return self.rules.leaves_with_final_count and rank.phase in ("finished", "left", "stopped")

    def decide(self, state: State, k: int) -> Outcome:
        """The decision that follows from all answers."""
        round_ = self.setup.rounds[k]
        sent = [q for q, rank in enumerate(state.ranks) if rank.sent >> k & 1]
        requests = [request for q in sent if (request := round_.requests[q]) is not None]
        bound = max(
            rank.opened[k] if q in sent else rank.passed for q, rank in enumerate(state.ranks)
        )
        stops = [request.mode for request in requests if request.action == "stop"]
        if stops:
            mode: Mode = "micro-batch" if "micro-batch" in stops else "window"
            return Outcome("stop", mode, bound)
        all_can = len(sent) == len(state.ranks) and all(round_.can_save)
        return Outcome("save", "micro-batch", bound, failed=not all_can or not requests)

    def _proposed(self, state: State, k: int, what: str, outcome: Outcome) -> Next:
        decisions = (*state.decisions[:k], outcome, *state.decisions[k + 1 :])
        return Step(what, round=k), State(state.ranks, decisions)

    # The commit of the final snapshot.

    def _may_hear_of_the_commit(self, state: State) -> bool:
        if self.rules.commit_ends_it:
            return False
        return all(rank.phase in ("quiesced", "stopped") for rank in state.ranks)

    def _is_over(self, state: State) -> bool:
        """Whether it is committed: all have stopped, or all are there in `close()`."""
        if not self.rules.commit_ends_it:
            return False
        if all(rank.phase in ("quiesced", "left") for rank in state.ranks):
            return True
        places = self._takes_part.get("final snapshot")
        return places is not None and all(_is_there(state.ranks[q], at) for q, at in places)


def _is_skip(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.failed and outcome.action == "save"


def _is_there(rank: Rank, index: int) -> bool:
    return rank.at > index or (rank.at == index and rank.phase == "runs")


def _with(state: State, step: Step, rank: Rank) -> Next:
    ranks = (*state.ranks[: step.rank], rank, *state.ranks[step.rank + 1 :])
    return step, State(ranks, state.decisions)
