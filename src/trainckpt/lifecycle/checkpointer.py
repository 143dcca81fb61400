"""The Checkpointer: the object a training script holds.

    with Checkpointer("runs/gpt", model=model, optimizer=optimizer, loader=loader) as ckpt:
        for epoch in ckpt.epochs(3):
            for batch in ckpt.batches():
                ...

Order of events:

    construct   read options, register objects, start to listen for notices
    resume      claim the attempt, choose and read a snapshot, apply it        (on entering)
    boundary    whenever the next batch is asked for: count, save if due, act on what all ranks
                agreed on. Without a notice it costs a flag test
    close       a counted boundary, the final snapshot, a barrier               (on leaving)

Everything public is called on the training thread, by all ranks alike; `save` also by one alone.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainckpt.data.loader import TrackedLoader
from trainckpt.data.sampler import set_epoch
from trainckpt.data.untracked import shield_every_loader
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt import RUNNING
from trainckpt.format.exactness import Restored
from trainckpt.format.names import check_tag
from trainckpt.lifecycle.attempt import Attempt, Crew, set_out
from trainckpt.lifecycle.deciding.outlook import Outlook
from trainckpt.lifecycle.deciding.pace import Pace
from trainckpt.lifecycle.deciding.proven_files import tracked_files
from trainckpt.lifecycle.known import Known
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.places.slower import open_slower
from trainckpt.lifecycle.reading import recorder
from trainckpt.lifecycle.reasons import seen_since
from trainckpt.lifecycle.resuming.arrival import Arrival
from trainckpt.lifecycle.resuming.last_words import LastWords
from trainckpt.lifecycle.run.data_world import take_data_world
from trainckpt.lifecycle.run.hooks import Hooked, Hooks
from trainckpt.lifecycle.run.log import logger, prepare
from trainckpt.lifecycle.run.options import TABLE, read_options
from trainckpt.lifecycle.run.pending import PendingSave
from trainckpt.lifecycle.run.position import Position
from trainckpt.lifecycle.run.slips import Slips
from trainckpt.lifecycle.run.told import Teller
from trainckpt.lifecycle.saving.requests import Requests
from trainckpt.lifecycle.stopping.watch import Watch
from trainckpt.preemption.notice import Notice
from trainckpt.ranks.agreement import Agreement
from trainckpt.ranks.world import current_world
from trainckpt.state.registry import Registry

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from trainckpt.format.cursor import Cursor


class Checkpointer(Known, Hooked):
    """Saves and resumes one training run, exactly, at any micro-batch.

    Args:
        run: Directory of the run, that all hosts see, or a URL such as `s3://bucket/run`; None:
            what `trainckpt run --run` named.
        loader: The training data loader (or a list; the first one's batches are the
            micro-batches).
        **keywords: Options (docs/options.md); `mesh` and `data_dims`, the names of its dimensions
            along which ranks see different data, where not all do; and the objects to track,
            each under its own name: modules, optimizers, anything with `state_dict` and
            `load_state_dict`, or lists of them.

    Raises:
        ConfigurationError: an option or an object cannot work; says which.
    """

    def __init__(
        self, run: str | os.PathLike[str] | None = None, *, loader: Any = None, **keywords: Any
    ) -> None:
        prepare()
        self._teller = Teller(run or "")
        with self._teller.refusals():
            self._set_up(run, loader, keywords)

    def _set_up(self, run: Any, loader: Any, keywords: dict[str, Any]) -> None:
        self.options = read_options({name: keywords.pop(name, None) for name in TABLE})
        shield_every_loader()
        self._tier = place.open_place(run)
        slower = open_slower(self.options.tiers, self.options.durable, self._tier)
        self._world = current_world()
        data_world = take_data_world(keywords)
        self._position = Position(self.options.accumulate)
        self._slips = Slips(self._position)
        has_peers = data_world is not None and data_world.size < self._world.size
        self._registry = registry = Registry(has_peers=has_peers)
        self._hooks, self._pace, self._requests = Hooks(), Pace(), Requests()
        self._outlook = Outlook(self.options, registry, self._position, self._pace)
        self._files, self._arrival = tracked_files(registry, run), Arrival(registry, self._position)
        self._recorder = recorder.recorder_from_environment(self._world.rank, registry)
        self._first = self._to_prove = True
        self._problems = list[Restored]()
        self._attempt: Attempt | None = None
        self._loaders: list[tuple[Any, TrackedLoader]] = []
        for name, value in keywords.items():
            registry.add(name, value)
        registry.add_implied()
        self._note(registry.problems())
        for told in (self._position.watch_steps(registry), registry.lacks()):
            if told:
                logger.warning("%s", told)
        for item in loader if isinstance(loader, (list, tuple)) else [loader]:
            if item is not None:
                self.loader(item)
        self._agreement = Agreement()
        self._watch = Watch(self._agreement, self._tier, self._outlook, self.options, self._teller)
        self._teller.tell(
            rank=self._world.rank, host=self._world.host, run=self._tier.url,
            grace_s=self._watch.grace_s,
        )  # fmt: skip
        self._crew = Crew(
            self.options, self._tier, self._world, self._registry, self._position,
            self._pace, self._outlook, self._arrival, self._watch, self._teller, self._requests,
            self._loaders, self._problems, LastWords(self._tier, self._world.rank), self._files,
            self._hooks, slower, data_world,
        )  # fmt: skip

    # ---- life cycle

    def __enter__(self) -> Checkpointer:
        if self._attempt is None:
            self.resume()
            self._slips.knows_epoch = False  # nobody was told
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self.close()
        elif self._attempt is not None:
            self._attempt.departure.abandon(error, self._position.cursor)

    def resume(self, mode: str | None = None) -> Cursor:
        """Go on from the newest usable snapshot, or begin at step 0. Called once.

        Args:
            mode: "auto", "required" or "never"; None means the option `resume`.

        Returns:
            The cursor to go on from.

        Raises:
            NothingToResume: required, and there is no such run.
            NoUsableSnapshot: snapshots were committed, and each is refused; lists why.
            StateMismatch: the script's objects differ from the snapshot; lists every difference.
            TierUnavailable: the run's place refused or did not answer.
        """
        if self._attempt is not None:
            raise ConfigurationError("this Checkpointer has resumed already")
        self._attempt = attempt = set_out(self._crew, mode or self.options.resume)
        self._slips.begin(attempt.resumed_from)
        if attempt.resumed_from is not None:
            try:
                self._hooks.resumed(self._position.cursor, attempt.beginning.lost)
            except BaseException as error:
                attempt.departure.abandon(error, self._position.cursor)
                raise
        return self.cursor

    def close(self) -> None:
        """A counted boundary, the final snapshot, a barrier: the attempt is finished.

        Raises:
            SaveFailed: the final snapshot could not be committed.
            ConfigurationError: a resumed run was trained past the snapshot's boundary.
            Stopped: the ranks had agreed to stop here.
        """
        if self._attempt is None or self._attempt.departure.left:
            return
        self._end_training()
        if self._boundary(closing=True):
            cursor = self._position.cursor
            self._requests.take_put_off(self._attempt.saver, cursor, waits=True)
            self._attempt.departure.finish(cursor)

    # ---- loops

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs up to `number`, from the one the run is in.

        Tells the loader's sampler each epoch (`set_epoch`), where it wants to know.
        """
        self._must_have_resumed()
        self._position.manage_epochs()
        self._slips.enter_epochs(has_any=self._position.cursor.epoch < number)
        while (epoch := self._position.cursor.epoch) < number and not self._has_returned():
            for original, _ in self._loaders:
                set_epoch(original, epoch)
            yield epoch
            if not self._has_returned():
                self._position.enter_epoch(epoch + 1)

    def batches(self) -> Iterator[Any]:
        """The loader's next pass, or the rest of the one the run stopped in."""
        self._must_have_resumed()
        if not self._loaders:
            raise ConfigurationError(
                "there is no loader to take batches from",
                hint="pass loader=, or call ckpt.boundary() before fetching each micro-batch",
            )
        return iter(self._loaders[0][1])

    def loader(self, loader: Iterable[Any]) -> TrackedLoader:
        """A drop-in for `loader`, with the boundary inside; the same one for the same loader."""
        for original, tracked in self._loaders:
            if loader is original or loader is tracked:
                return tracked
        if not self._first:
            raise ConfigurationError(
                "a loader cannot be registered after training has begun: nothing would know its "
                "position",
                hint="make each loader once, and pass it as loader= or wrap it before the loop. "
                "For another order in each epoch, give it a sampler with set_epoch(), which "
                "ckpt.epochs() calls, or one that shuffles by seed + epoch",
            )
        leader = self._loaders[0][1] if self._loaders else None
        first, name = leader is None, "loader" if leader is None else f"loader.{len(self._loaders)}"
        tracked = TrackedLoader(
            loader, name=name, leader=leader,
            on_boundary=self._loader_boundary if first else None,
            before_first_fetch=self._arrival.before_first_fetch if first else None,
            report=self._report,
        )  # fmt: skip
        if first and self._recorder is not None:
            tracked.after_fetch = self._recorder.batch
        self._registry.add_loader(name, tracked, loader)
        self._loaders.append((loader, tracked))
        self._note(tracked.problems())
        self._position.watch_loader(tracked)
        self._arrival.register_late(self._registry.loaders[-1], tracked if first else None)
        return tracked

    def track_file(self, file: Any) -> None:
        """Track a file that this rank alone appends to: its path, or `open(path, "a")`'s result.

        Snapshots hold its length. A resume cuts it back, what came after is kept beside it as
        `<file>.after-<attempt>`. A shorter or missing file is refused.
        """
        self._files.track(file)

    def boundary(self) -> bool:
        """Call before fetching each micro-batch, in loops without a tracked loader.

        Returns:
            True to go on; False after a stop with `on_stop="return"`.
        """
        self._must_have_resumed()
        goes_on = self._boundary()
        self._position.begin_outside_batch()
        return goes_on

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation. Entering is a counted boundary.

        A resume from there repeats the evaluation, not the epoch. In the middle of an epoch
        nothing is saved here: what is due is done when the next batch is asked for.
        """
        self._must_have_resumed()
        self._boundary(evaluation=True)
        yield

    def save(self, tag: str | None = None, wait: str | None = None) -> PendingSave:
        """Ask for a snapshot, taken at the next boundary that all ranks agree on; at a later one
        if the save before it hangs (`put_off`). Training does not wait for that.

        Called by all ranks or by one: the n-th call of any rank asks for the same save.

        Args:
            tag: A name for it; a tagged snapshot is never pruned.
            wait: Moment to wait for; an error on the training thread, which has to reach the
                boundary first.

        Returns:
            The handle: `.wait("staged" | "local" | "durable")`.
        """
        attempt = self._must_have_resumed()
        tag = check_tag(tag) if tag else None
        number, pending = self._requests.ask(tag)
        if not pending.ended:  # else all have taken it before this rank asked
            self._watch.watcher.request_save(number, tag)
        if attempt.departure.left or self._watch.watcher.lost:
            self._requests.fail_waiting("ended" if attempt.departure.left else "lost its store")
        return pending.wait(wait) if wait else pending

    # ---- the boundary

    def _boundary(self, *, evaluation: bool = False, closing: bool = False) -> bool:
        """Count, save what is due, act on what was agreed. True: training goes on."""
        attempt = self._attempt
        if attempt is None or attempt.departure.left:
            return self._boundary_after_leaving()
        position, policy, now_s = self._position, attempt.policy, time.monotonic()
        self._pace.reach(now_s)
        position.reach_boundary(evaluation=evaluation)
        if self._to_prove or self._arrival.under_way or self._recorder is not None:
            self._seldom(evaluation=evaluation, closing=closing)
        resumable = (position.between_batches or not evaluation) and not self._arrival.to_come
        attempt.begin_window(position, resumable=resumable and not evaluation)
        if resumable and self._requests.put_off:
            self._requests.take_put_off(attempt.saver, position.cursor)
            self._pace.leave(time.monotonic())
        if resumable and policy.due_by_steps(position.step, position.micro):
            attempt.saver.save(position.cursor, policy.reason, (), PendingSave(), **policy.how)
            self._pace.leave(time.monotonic())
        self._watch.check()
        if policy.due_by_time(now_s) and self._world.rank == 0:
            self._watch.watcher.request(Notice(policy.reason, action="save"))
        while (
            due := self._agreement.at_boundary(resumable=resumable, window_end=not position.micro)
        ) is not None:
            if due.action == "save":
                self._requests.take(attempt.saver, position.cursor, due)
                self._agreement.close_round(due.round)
            elif not attempt.departure.stop(position.cursor, due):
                return False
            self._pace.leave(time.monotonic())
        if self._agreement.has_skipped():
            self._requests.drop(self._agreement.skipped())
        return True

    def _seldom(self, *, evaluation: bool, closing: bool) -> None:
        """What only the first boundaries, the arrival of a resume, or a proof asks for."""
        attempt = self._must_have_resumed()
        if self._first or (self._to_prove and self._slips.trained):
            self._to_prove = self._first  # an optimizer makes its state in the first step
            self._must_be_able_to_save(attempt, at_first=self._first)
        if self._first:
            self._first = False
            self._registry.watched.training_begins()
            self._slips.reach(asks=not (evaluation or closing or self._hooks.on_resume))
            self._files.say_uncut(attempt.number)
            attempt.log.change_soon(state=RUNNING)
            self._crew.last_words.stop()
        if self._arrival.under_way:
            entered = self._position.cursor.evaluations
            found = self._arrival.reach(evaluation=entered, has_loader=bool(self._loaders))
            attempt.departure.note(seen_since(found))
        cursor = self._position.cursor
        if self._recorder is not None:
            self._recorder.boundary(cursor, evaluation=evaluation)
            self._recorder.strike(cursor, self._agreement.has_open_round)

    def _must_be_able_to_save(self, attempt: Attempt, *, at_first: bool) -> None:
        try:
            with self._teller.refusals():
                attempt.must_be_able_to_save(self._crew, at_first=at_first)
        except ConfigurationError as error:
            attempt.departure.abandon(error, self._position.cursor)
            raise

    def _end_training(self) -> None:
        self._slips.end()
        try:
            with self._teller.refusals():
                self._arrival.must_not_undo(self._slips.trained)
        except ConfigurationError as error:
            self._must_have_resumed().departure.abandon(error, self._position.cursor)
            raise

    def _loader_boundary(self) -> None:
        self._must_have_resumed()
        self._position.begin_loader_batch()
        if not self._boundary():
            raise StopIteration  # on_stop="return": the loop simply ends

    def _boundary_after_leaving(self) -> bool:
        """The attempt is over: only after a stop is it wrong to go on."""
        if self._attempt is not None and self._attempt.departure.stopped:
            if not self._has_returned():
                self._attempt.departure.exit_now()
            return False
        return True

    # ---- small things

    def _note(self, problems: list[Restored]) -> None:
        """Warn of what cannot be exact; a resume says and records it again."""
        self._problems += problems
        for problem in problems:
            logger.warning("not exact: %s", problem.reason)
        if self._attempt is not None and self._attempt.resumed_from is not None:
            self._attempt.departure.restored += tuple(problems)

    def _report(self, part: Restored) -> None:
        """Take how a loader goes on, as it turns out while it does."""
        if self._attempt is None:
            self._note([part])  # as its state is loaded
        else:
            self._attempt.departure.note([part])

    def _has_returned(self) -> bool:
        stopped = self._attempt is not None and self._attempt.departure.stopped
        return stopped and self.options.on_stop == "return"

    def _must_have_resumed(self) -> Attempt:
        if self._attempt is None:
            raise ConfigurationError(
                "this Checkpointer has not resumed yet",
                hint="use it in a with statement, or call ckpt.resume() first",
            )
        return self._attempt
