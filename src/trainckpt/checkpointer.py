"""The Checkpointer: the public object of a training script.

    with Checkpointer("runs/gpt", model=model, optimizer=optimizer, loader=loader) as ckpt:
        for epoch in ckpt.epochs(3):
            for batch in ckpt.batches():
                ...

Order of events:

    construct   read options, register objects, start to listen for notices
    resume      claim the attempt, choose and read a snapshot, apply it        (on entering)
    boundary    at each request for the next batch: count, save if due, act on the ranks'
                decisions. Without a notice it costs a flag test
    close       a counted boundary, the final snapshot, a barrier               (on leaving)

All public methods are called on the training thread, by all ranks alike; `save` also by one alone.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.git_commit import GitCommit
from trainckpt.attempt.log import logger, prepare
from trainckpt.attempt.options import (
    TABLE,
    may_be_option,
    pop_data_world,
    read_options,
    refuse_taken_names,
)
from trainckpt.attempt.progress_counter import ProgressCounter
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.attempt.script_hooks import Hooks
from trainckpt.attempt.status_files import RankStatusWriter
from trainckpt.attempt.time_keeper import TimeKeeper
from trainckpt.attempt.tracked_runs import TrackedRuns
from trainckpt.data import counted_loops
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.sampler import set_epoch
from trainckpt.data.untracked import shield_all_loaders
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt_record import RUNNING
from trainckpt.format.changes import choice_by_kind
from trainckpt.format.exactness import How, Restored
from trainckpt.format.names import check_tag
from trainckpt.gc_pause import gc_paused
from trainckpt.notice import Notice
from trainckpt.ranks.boundary_gate import BoundaryGate
from trainckpt.ranks.world import current_world
from trainckpt.recording.recorder import recorder_from_environment
from trainckpt.recording.script_files import tracked_files
from trainckpt.resume import script_changes
from trainckpt.resume.apply_phases import PhasedRestore
from trainckpt.resume.crash_marker import CrashMarker
from trainckpt.resume.exactness_report import seen_since
from trainckpt.run_directory import run_url
from trainckpt.run_directory.tier_config import open_slower
from trainckpt.save.checks import UntrackedOptimizers, check_storable
from trainckpt.save.estimates import SaveEstimator, Timings
from trainckpt.save.schedule import SaveRequests
from trainckpt.start_attempt import Attempt, RankContext, start_attempt
from trainckpt.state import autocast_cache, script_randomness, script_variables
from trainckpt.state.registry import Registry
from trainckpt.state.script_randomness import EarlyDraws
from trainckpt.stop.hard_exit import HardExit
from trainckpt.stop.notice_listener import NoticeListener

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from trainckpt.attempt.script_hooks import AnyHook, AnyResumeHook
    from trainckpt.format.cursor import Cursor
    from trainckpt.notice import NoticeSource


class Checkpointer:
    """Save and resume one training run, exactly, at any micro-batch.

    Args:
        run: Directory of the run, visible to all hosts, or a URL such as `s3://bucket/run`. By
            default the one given to `trainckpt run --run`.
        loader: The training data loader, or a list of loaders; the batches of the first are the
            micro-batches.
        **keywords: Objects to track, each under a name of your choice: modules, optimizers,
            anything with `state_dict` and `load_state_dict`, or lists of them. Options
            (docs/options.md). Where ranks share their data, `mesh` and `data_dims`: the device
            mesh and the names of its dimensions along which the data differ.

    Raises:
        ConfigurationError: An option or an object cannot work; the message names it.
    """

    def __init__(
        self, run: str | os.PathLike[str] | None = None, *, loader: Any = None, **keywords: Any
    ) -> None:
        prepare()
        self._status_writer = RankStatusWriter(run or "")
        with self._status_writer.refusals():
            self._set_up(run, loader, keywords)

    def _set_up(self, run: Any, loader: Any, keywords: dict[str, Any]) -> None:
        self.options = read_options(
            {n: keywords.pop(n, None) for n in TABLE if may_be_option(n, keywords.get(n))}
        )
        own = self._trainer_objects()
        refuse_taken_names(own, keywords)
        keywords = {**own, **keywords}
        shield_all_loaders()
        self._tier = run_url.open_run_tier(run)
        slower = open_slower(self.options.tiers, self.options.durable, self._tier)
        self._world = current_world()
        commit = GitCommit() if self._world.rank == 0 else None
        data_world = pop_data_world(keywords)
        self._times = TimeKeeper()
        self._position = ProgressCounter(self.options.accumulate, self._times)
        self._loop_checks = self._position.checks
        has_peers = data_world is not None and data_world.size < self._world.size
        self._registry = registry = Registry(
            has_peers=has_peers, choices=choice_by_kind(self.options.changed)
        )
        self._autocast_cache = autocast_cache.AutocastCache(registry)
        self._hooks, self._timings, self._requests = Hooks(), Timings(self._times), SaveRequests()
        estimator = SaveEstimator(self.options, registry, self._timings)
        self._files = tracked_files(registry, run)
        self._runs = TrackedRuns(registry, self._tier, self._world.rank)
        self._phased_restore = PhasedRestore(registry, self._position)
        self._recorder = recorder_from_environment(self._world.rank, registry)
        self._awaits_first_boundary = True
        self._storable_check_due = True  # also after the first step: it makes the optimizer's state
        self._training_thread = 0  # its id, from `resume` on
        self._problems = list[Restored]()
        self._attempt: Attempt | None = None
        self._loaders: list[tuple[Any, TrackedLoader]] = []
        self._early_draws = EarlyDraws(registry, self._report)
        self._counted_windows: counted_loops.CountedWindows | None = None
        for name, value in keywords.items():
            registry.add(name, value)
        registry.add_implied()
        self._note(registry.problems())
        for warning in (self._position.watch_steps(registry), registry.lacks()):
            if warning:
                logger.warning("%s", warning)
        for item in loader if isinstance(loader, (list, tuple)) else [loader]:
            if item is not None:
                self.loader(item)
        self._gate, hard_exit = BoundaryGate(), HardExit()
        self._listener = NoticeListener(
            gate=self._gate,
            tier=self._tier,
            timings=self._timings,
            options=self.options,
            status_writer=self._status_writer,
            hard_exit=hard_exit,
            trainer_sources=self._trainer_sources(),
        )
        registry.left_s = self._listener.deadline.left_s
        self._status_writer.update(
            rank=self._world.rank,
            host=self._world.host,
            run=self._tier.url,
            grace_s=self._listener.grace_s,
        )
        self._context = RankContext(
            options=self.options,
            tier=self._tier,
            world=self._world,
            registry=self._registry,
            position=self._position,
            timings=self._timings,
            estimator=estimator,
            phased_restore=self._phased_restore,
            listener=self._listener,
            hard_exit=hard_exit,
            status_writer=self._status_writer,
            requests=self._requests,
            loaders=self._loaders,
            problems=self._problems,
            crash_marker=CrashMarker(self._tier, self._world.rank),
            files=self._files,
            runs=self._runs,
            hooks=self._hooks,
            slower=slower,
            data_world=data_world,
            git_commit=commit,
        )

    @property
    def cursor(self) -> Cursor:
        """Position of the run; inside the loop, that of the micro-batch being trained."""
        self._loop_checks.note_epoch()
        return self._position.cursor

    @property
    def resumed_from(self) -> Cursor | None:
        """Position at which this attempt resumed, or None if it began at step 0."""
        self._loop_checks.note_epoch()
        return self._attempt.beginning.cursor if self._attempt else None

    @property
    def attempt(self) -> int:
        """Number of this attempt; the first start of a run is 1."""
        return self._must_have_resumed().beginning.record.attempt

    # ---- life cycle

    def __enter__(self) -> Checkpointer:
        if self._attempt is None:
            self.resume()
            self._loop_checks.note_epoch(is_known=False)  # the script has not read it yet
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool | None:
        if kind is None:
            self.close()
        elif self._attempt is not None:
            self._untracked.close()
            self._attempt.shutdown.abandon(error, self._position.cursor)
        self._end_git()
        return None

    def resume(self, mode: str | None = None) -> Cursor:
        """Resume from the newest usable snapshot, or begin at step 0. Called once.

        Args:
            mode: "auto", "required" or "never"; by default the option `resume`.

        Returns:
            The position to continue from.

        Raises:
            NothingToResume: A resume is required, and there is no record of the run.
            NoUsableSnapshot: Snapshots were committed, and each is refused; lists the reasons.
            StateMismatch: The script's objects differ from the snapshot; lists every difference.
            TierUnavailable: The run directory did not answer or denied access.
        """
        if self._attempt is not None:
            raise ConfigurationError("this Checkpointer has resumed already")
        self._training_thread = threading.get_ident()
        mode = mode or self.options.resume
        self._runs.begins_anew = mode == "never"
        self._attempt = attempt = start_attempt(self._context, mode)
        self._loop_checks.begin(attempt.beginning.cursor)
        self._untracked = UntrackedOptimizers(self._registry, self._position, self._report)
        if attempt.beginning.cursor is not None:
            try:
                self._hooks.resumed(self._position.cursor, attempt.beginning.lost)
            except BaseException as error:
                attempt.shutdown.abandon(error, self._position.cursor)
                raise
        return self.cursor

    def close(self) -> None:
        """Finish the run: commit the final snapshot and wait for the other ranks.

        The end of the `with` statement calls it.

        Raises:
            SaveFailed: The final snapshot could not be committed.
            ConfigurationError: A resumed run was trained past the snapshot's boundary.
            Stopped: The ranks had agreed on a stop at this boundary.
        """
        if self._attempt is None or self._attempt.shutdown.left:
            return
        self._end_training()
        self._registry.is_over = True
        if self._boundary(closing=True):
            cursor = self._position.cursor
            self._requests.retry_deferred(self._attempt.saver, cursor, waits=True)
            self._attempt.shutdown.finish(cursor)
        self._end_git()

    def _end_git(self) -> None:
        if self._context.git_commit is not None:
            self._context.git_commit.close()

    # ---- loops

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the numbers of the epochs left of `number`, from the current one.

        Calls `set_epoch` of the loaders' samplers at each epoch, where they have one.
        """
        self._must_have_resumed()
        self._position.manage_epochs()
        for _, tracked in self._loaders:
            tracked.count_passes_of_epochs()
        self._loop_checks.enter_epochs(has_any=self._position.cursor.epoch < number)
        while (epoch := self._position.cursor.epoch) < number and not self._has_returned():
            for original, _ in self._loaders:
                set_epoch(original, epoch)
            self._phased_restore.enter_epoch(epoch)
            self._registry.epoch_head.begin(epoch)
            yield epoch
            if not self._has_returned():
                self._position.enter_epoch(epoch + 1)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the next pass, or the rest of the pass in which the run stopped."""
        self._must_have_resumed()
        if not self._loaders:
            raise ConfigurationError(
                "there is no loader to take batches from",
                hint="pass loader=, or call ckpt.boundary() before fetching each micro-batch",
            )
        return iter(self._loaders[0][1])

    def loader(self, loader: Iterable[Any]) -> TrackedLoader:
        """Return a loader with the batches of `loader` and a boundary before each of them.

        A second call with the same loader, or with the result, returns the same object.
        """
        for original, tracked in self._loaders:
            if loader is original or loader is tracked:
                return tracked
        if not self._awaits_first_boundary:
            raise ConfigurationError(
                "a loader cannot be registered after training has begun: nothing would know its "
                "position",
                hint="make each loader once, and pass it as loader= or wrap it before the loop. "
                "For another order in each epoch, give it a sampler with set_epoch(), which "
                "ckpt.epochs() calls, or one that shuffles by seed + epoch. For other data, change "
                "what its dataset holds between two passes, and give the dataset state_dict and "
                "load_state_dict",
            )
        leader = self._loaders[0][1] if self._loaders else None
        first, name = leader is None, "loader" if leader is None else f"loader.{len(self._loaders)}"
        tracked = TrackedLoader(
            loader,
            name=name,
            leader=leader,
            on_boundary=self._loader_boundary if first else None,
            before_first_fetch=self._before_first_fetch if first else None,
            after_fetch=self._recorder.batch if first and self._recorder is not None else None,
            early_draws=self._early_draws,
            report=self._report,
            tracked_places=self._registry.tracked_places,
        )
        self._registry.add_loader(name, tracked, loader)
        self._loaders.append((loader, tracked))
        self._note(tracked.problems())
        self._position.watch_loader(tracked)
        changes = self._phased_restore.register_late(
            self._registry.loaders[-1], tracked if first else None
        )
        if changes:
            if self._world.rank == 0:
                script_changes.log(changes)
            self._note(script_changes.restored(changes))
        return tracked

    def track_file(self, file: Any) -> None:
        """Track a file to which this rank alone appends.

        Snapshots store its length. A resume cuts the file back to it, and keeps the rest beside it
        as `<file>.after-<attempt>`. A file that is missing or shorter is refused.

        Args:
            file: Its path, or the file object of `open(path, "a")`.
        """
        self._files.track(file)

    def track_run(self, run: Any) -> Any:
        """Track the run of an experiment tracker, so that it shows each step once.

        Snapshots store its id and its position. A resume goes on in the run of the snapshot, not
        in the one given here, and cuts off what was logged after the snapshot; what this attempt
        has logged to it before is dropped. Call it after the resume, on the rank that logs.

        Args:
            run: A `torch.utils.tensorboard.SummaryWriter`, a run of `mlflow.start_run()` or an
                offline run of `wandb.init()`, made anywhere in the script.

        Returns:
            The writer or run to log to.

        Raises:
            ConfigurationError: The tracker is of another kind.
        """
        return self._runs.track(run, self._must_have_resumed().record_writer)

    def boundary(self) -> bool:
        """Save or stop here if due; for loops without a tracked loader, before each micro-batch.

        Returns:
            True to continue; False after a stop with `on_stop="return"`.
        """
        self._must_have_resumed()
        if not self._early_draws.is_over:
            self._early_draws.before_batch(is_leader=True)
        goes_on = self._boundary()
        if goes_on:
            self._position.begin_outside_batch()
        return goes_on

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Return a context manager for an evaluation; entering it is a boundary.

        A resume from there repeats the evaluation, not the epoch. In the middle of an epoch,
        saves and stops wait for the next training batch.
        """
        self._must_have_resumed()
        self._boundary(evaluation=True)
        self._times.begin_evaluation()
        try:
            yield
        finally:
            self._times.end_evaluation()

    def save(self, tag: str | None = None, wait: str | None = None) -> SaveHandle:
        """Request a snapshot at the next boundary on which all ranks agree; training continues.

        All ranks may call it, or one: the n-th call of any rank requests the same save. While an
        older save is stuck, the save is taken at a later boundary.

        Args:
            tag: A name for the snapshot; tagged snapshots are never pruned.
            wait: Moment to wait for, as in `SaveHandle.wait`; an error on the training thread,
                which has to reach the boundary first.

        Returns:
            A handle to wait for the save and to ask how it went.
        """
        attempt = self._must_have_resumed()
        tag = check_tag(tag) if tag else None
        number, pending = self._requests.add(tag)
        if not pending.ended:  # else all have taken it before this rank called
            self._listener.watcher.request_save(number, tag)
        if attempt.shutdown.left or self._listener.watcher.lost:
            self._requests.fail_waiting("ended" if attempt.shutdown.left else "lost its store")
        return pending.wait(wait) if wait else pending

    def on_resume(self, hook: AnyResumeHook) -> AnyResumeHook:
        """Decorate a function `hook(cursor, lost)`, called after a resume has restored the state.

        `lost` is the number of micro-batches trained after the snapshot, which are trained again;
        None if it is unknown. A run that begins at step 0 does not call it.
        """
        self._hooks.add_on_resume(hook)
        return hook

    def before_dump(self, hook: AnyHook) -> AnyHook:
        """Decorate a function `hook()`, called on every rank before its process is dumped.

        Close connections to other programs there, since they cannot be dumped. The snapshot is
        committed by then. If a hook raises, the ranks stop with the snapshot, without a dump.
        """
        self._hooks.before_dump.append(hook)
        return hook

    def after_restore(self, hook: AnyHook) -> AnyHook:
        """Decorate a function `hook()`, called in restored processes before they train on.

        Open the connections again that `before_dump` closed. If a hook raises, the processes end,
        and `trainckpt resume` launches the command from the snapshot.
        """
        self._hooks.after_restore.append(hook)
        return hook

    # ---- the boundary

    def _boundary(
        self, *, evaluation: bool = False, closing: bool = False, is_in_loader: bool = False
    ) -> bool:
        """Count, save if due, act on decisions. Return True if training goes on."""
        attempt = self._attempt
        if attempt is None or attempt.shutdown.left:
            return self._boundary_after_leaving()
        position, schedule, now_s = self._position, attempt.schedule, time.monotonic()
        self._timings.on_boundary(now_s)
        position.reach_boundary(evaluation=evaluation)
        if self._registry.epoch_head.is_open and not evaluation:
            self._registry.epoch_head.end()
        to_compare = (
            self._phased_restore.under_way or attempt.report.is_awaited or self._counted_windows
        )
        self._look_at_autocast()
        if self._storable_check_due or to_compare or self._recorder is not None:
            with gc_paused():
                self._boundary_near_start(
                    evaluation=evaluation, closing=closing, is_in_loader=is_in_loader
                )
        is_whole = position.between_batches or not evaluation
        resumable = is_whole and not self._phased_restore.to_come
        if resumable and not (evaluation or position.micro):
            self._at_window_end(attempt)
        if resumable and self._requests.deferred:
            self._requests.retry_deferred(attempt.saver, position.cursor)
            self._after_save(attempt)
        if resumable and schedule.due_by_steps(position.step, position.micro):
            handle = SaveHandle(is_requested=False)
            attempt.saver.save(
                position.cursor,
                schedule.reason,
                (),
                handle,
                may_skip=True,
                in_memory=schedule.is_in_memory,
            )
            self._after_save(attempt)
        self._listener.check()
        if schedule.due_by_time(now_s) and self._world.rank == 0:
            self._listener.watcher.request(Notice(schedule.reason, action="save"))
        while (
            due := self._gate.at_boundary(resumable=resumable, window_end=not position.micro)
        ) is not None:
            if not due.stops:
                self._requests.save(attempt.saver, position.cursor, due)
                self._gate.close_round(due.round)
            elif not attempt.shutdown.stop(position.cursor, due):
                return False
            self._after_save(attempt)
        if self._gate.has_skipped():
            self._requests.fail_skipped(self._gate.skipped())
        return True

    def _look_at_autocast(self) -> None:
        if self._autocast_cache.outlives_step(self._position.step):
            self._note([Restored("autocast", How.NOT_KEPT, autocast_cache.REASON)])

    def _at_window_end(self, attempt: Attempt) -> None:
        if attempt.survival is not None:
            attempt.survival.record(self._position.cursor)  # in case other ranks die
        for observer in attempt.observers:
            if not observer.is_over:
                observer.reach(self._position.step, self._position.window)
        if self._position.step >= attempt.weight_check.due_step:
            attempt.weight_check.reach(self._position.step)

    def _after_save(self, attempt: Attempt) -> None:
        attempt.report.read_findings()
        attempt.weight_check.note_save(attempt.saver.sequence, self._position.step)
        self._timings.after_save(self._position.cursor, time.monotonic())

    def _boundary_near_start(self, *, evaluation: bool, closing: bool, is_in_loader: bool) -> None:
        """Do the work of the first boundaries, of a resume not yet compared, and of a proof."""
        attempt = self._must_have_resumed()
        if self._storable_check_due:
            self._check_storable(attempt)
        is_first = self._awaits_first_boundary
        if is_first:
            self._awaits_first_boundary = False
            self._first_boundary(attempt, fetches_batch=not (evaluation or closing))
        self._compare_with_snapshot(attempt, is_in_loader=is_in_loader)
        if is_first:
            self._times.begin_training()
            self._listener.beat_soon()
        if self._recorder is not None:
            cursor = self._position.cursor
            self._recorder.boundary(cursor, evaluation=evaluation)
            self._recorder.strike(cursor, self._gate.has_open_round)

    def _check_storable(self, attempt: Attempt) -> None:
        """Check that the state can be stored, at the first boundary and after the first step."""
        at_first = self._awaits_first_boundary
        if not (at_first or self._loop_checks.trained):
            return
        self._storable_check_due = at_first
        with self._ending_on_refusal():
            check_storable(
                self._context.channel,
                self._registry,
                self._tier,
                at_first=at_first,
                is_resumed=attempt.beginning.saved is not None,
                excludes=bool(self.options.exclude),
            )

    def _first_boundary(self, attempt: Attempt, *, fetches_batch: bool) -> None:
        """Note that training begins. `fetches_batch`: a batch follows."""
        self._registry.watched.training_begins()
        self._registry.callback_values.begin()
        if script_randomness.is_plain_loop():
            self._registry.open_loaders.begin()
        self._registry.script_variables.begin(attempt.beginning.run)
        self._loop_checks.on_first_boundary(asks=fetches_batch and not self._hooks.on_resume)
        self._files.warn_uncut(attempt.beginning.record.attempt)
        self._times.begin_training()
        attempt.record_writer.change_soon(state=RUNNING)
        self._context.crash_marker.disarm()

    def _compare_with_snapshot(self, attempt: Attempt, *, is_in_loader: bool) -> None:
        """Go on with a resume: restore what is due here, and compare the run with the snapshot."""
        if self._counted_windows is not None:
            self._counted_windows.reach_boundary(self._position.step, self._position.window)
            self._counted_windows = None if self._counted_windows.is_over else self._counted_windows
        was_under_way = self._phased_restore.under_way
        if was_under_way:
            entered = self._position.cursor.evaluations
            found = self._phased_restore.reach(evaluation=entered, has_loader=is_in_loader)
            attempt.report.note(seen_since(found))
            if found.numbers:
                logger.info("hint: %s", script_variables.hint(found.numbers))
        if was_under_way and not self._phased_restore.under_way:
            attempt.report.compared()
        elif attempt.report.is_awaited:
            attempt.report.read_findings()

    def _end_training(self) -> None:
        self._untracked.close()
        self._loop_checks.end()
        with self._ending_on_refusal():
            self._phased_restore.must_not_undo(self._loop_checks.trained)

    @contextmanager
    def _ending_on_refusal(self) -> Iterator[None]:
        """End the attempt by a refusal raised inside."""
        try:
            with self._status_writer.refusals():
                yield
        except ConfigurationError as error:
            self._must_have_resumed().shutdown.abandon(error, self._position.cursor)
            raise

    def _loader_boundary(self) -> None:
        self._must_have_resumed()
        if threading.get_ident() != self._training_thread:
            raise ConfigurationError(
                "a batch is asked for on another thread than the one that resumed: a batch that "
                "waits for the training loop would count as trained",
                hint="iterate ckpt.batches() in the training loop itself; to load ahead, give the "
                "DataLoader num_workers, and to copy ahead, pin_memory and non_blocking=True",
            )
        if self._position.is_at_boundary:
            return  # of `boundary()`; the script may have drawn random numbers since
        self._position.begin_loader_batch()
        if not self._boundary(is_in_loader=True):
            raise StopIteration  # on_stop="return": the loop simply ends

    def _before_first_fetch(self) -> bool:
        """Restore the generators before the first batch after a resume.

        Loops that count or repeat batches are named.
        """
        iterator, cursor = self._loaders[0][1].running_iterator, self._position.cursor
        if cursor.batches and iterator is not None:
            hint = counted_loops.hint(iterator, cursor, by_epochs=self._position.epochs_are_ours)
            if hint:
                logger.info("hint: %s", hint)
                if cursor.micro:
                    start = self._position.window_start()
                    self._counted_windows = counted_loops.CountedWindows(
                        start, cursor.micro, self._report
                    )
        names = counted_loops.cycled() if cursor.micro_batches else []
        self._note([Restored(name, How.NOT_KEPT, counted_loops.CYCLED) for name in names])
        return self._phased_restore.before_first_fetch()

    def _boundary_after_leaving(self) -> bool:
        """Handle a boundary after the attempt's end: an error only after a stop."""
        if self._attempt is not None and self._attempt.shutdown.stopped:
            if not self._has_returned():
                self._attempt.shutdown.exit_now()
            return False
        return True

    # ---- small things

    def _trainer_objects(self) -> dict[str, Any]:
        """Return the objects of the framework that runs the script, to track under these names."""
        return {}

    def _trainer_sources(self) -> Sequence[NoticeSource]:
        """Return the notice sources of the framework that runs the script, not started."""
        return ()

    def _note(self, problems: list[Restored]) -> None:
        """Warn of inexact parts; a resume logs and records them again."""
        self._problems += problems
        if self._attempt is not None and self._attempt.beginning.cursor is not None:
            self._attempt.report.note(problems)
            return
        for problem in problems:
            logger.warning("not exact: %s", problem.reason)

    def _report(self, part: Restored) -> None:
        """Take how a loader goes on, as it turns out while it does."""
        if self._attempt is None:
            self._note([part])  # as its state is loaded
        else:
            self._attempt.report.note([part])

    def _has_returned(self) -> bool:
        stopped = self._attempt is not None and self._attempt.shutdown.stopped
        return stopped and self.options.on_stop == "return"

    def _must_have_resumed(self) -> Attempt:
        if self._attempt is None:
            raise ConfigurationError(
                "this Checkpointer has not resumed yet",
                hint="use it in a with statement, or call ckpt.resume() first",
            )
        return self._attempt
