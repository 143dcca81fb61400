"""`ckpt.track_run`: each step once in what the tracker shows, after kills at any place."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.end_to_end.training import ACCUMULATE, Crash, Parts
from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError
from trainckpt.snapshot.attempt_history import read_attempts, run_id
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.state.adapters import tracked_run
from trainckpt.state.captured import Captured
from trainckpt.storage.local import LocalTier

MICRO_BATCHES = 10
CRASHES = (3, 6, 9)  # with saves after 2 steps, which are 4 micro-batches: after 0, 4 and 8


def train(place, open_log, crash_at=None, leave_at=None, workers=0, **options):
    """One attempt; `open_log` gets the Checkpointer and returns what logs a value."""
    parts = Parts(workers=workers)
    with Checkpointer(place, **parts.tracked(), **{"every": "2 steps", **options}) as ckpt:
        log = open_log(ckpt)
        for epoch in ckpt.epochs(2):
            for batch in ckpt.batches():
                cursor = ckpt.cursor
                at = cursor.micro_batches
                if at == crash_at:
                    ckpt._attempt.saver.wait()
                    raise Crash
                _, loss = parts.train_on(batch, cursor.micro + 1 == ACCUMULATE)
                log("loss", float.fromhex(loss), at)
                if at == leave_at:
                    return
            log("epoch", epoch, epoch)


def killed(*arguments, **how):
    with pytest.raises(Crash):
        train(*arguments, **how)


def with_three_kills(place, open_log):
    for at in CRASHES:
        killed(place, open_log, crash_at=at)
    train(place, open_log)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    values = {"loss": {}, "epoch": {}}
    train(
        tmp_path_factory.mktemp("straight"),
        lambda ckpt: lambda name, value, at: values[name].__setitem__(at, value),
    )
    return values


def logs_to(folder, writers):
    """What opens a writer in `folder`, a new one if it is a function."""

    def open_log(ckpt):
        for killed in writers:
            killed.close()  # as flushed at the latest as its process ended
        writer = SummaryWriter(folder() if callable(folder) else folder)
        writers.append(writer)
        writer.add_text("script", "text before training")
        ckpt.track_run(writer)
        return writer.add_scalar

    return open_log


def shown(folder):
    """Step and value of each event that is in the files, none hidden: tag -> events."""
    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    tags = events.Tags()
    found = {
        name: sorted((e.step, e.value) for e in events.Scalars(name)) for name in tags["scalars"]
    }
    return found | {name: len(events.Tensors(name)) for name in tags["tensors"]}


def same_as(straight):
    exact = {"loss": list(straight["loss"].items()), "epoch": list(straight["epoch"].items())}
    near = {name: [(at, pytest.approx(value)) for at, value in exact[name]] for name in exact}
    return near | {"script/text_summary": 1}


def test_tensorboard_has_each_step_once_after_three_kills(tmp_path, straight):
    """In the files themselves, and although epochs and micro-batches are counted apart."""
    writers = []
    with_three_kills(tmp_path / "run", logs_to(tmp_path / "logs", writers))
    writers[-1].close()
    assert shown(tmp_path / "logs") == same_as(straight)


def test_a_writer_in_a_new_folder_goes_back_to_the_run_s_own(tmp_path, straight):
    writers, folders = [], iter(tmp_path / f"logs{number}" for number in range(4))
    with_three_kills(tmp_path / "run", logs_to(lambda: next(folders), writers))
    writers[-1].close()
    assert [one.name for one in sorted(tmp_path.glob("logs*"))] == ["logs0"]
    assert shown(tmp_path / "logs0") == same_as(straight)


def test_a_copied_run_leaves_the_logs_of_the_original(tmp_path, caplog):
    writers, folders = [], iter(("logs", "copy"))
    open_log = logs_to(lambda: tmp_path / next(folders), writers)
    killed(tmp_path / "run", open_log, crash_at=6)
    writers[-1].close()
    before = shown(tmp_path / "logs")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    train(tmp_path / "other", open_log)
    writers[-1].close()
    assert shown(tmp_path / "logs") == before
    assert shown(tmp_path / "copy")["loss"][0][0] == 4
    assert "the run directory was" in caplog.text


def test_what_another_program_wrote_in_the_folder_is_left(tmp_path):
    writers, folder = [], tmp_path / "logs"
    killed(tmp_path / "run", logs_to(folder, writers), crash_at=6)
    other = folder / "events.out.tfevents.1700000000.elsewhere.1.0"
    other.write_bytes(b"of another program")
    train(tmp_path / "run", logs_to(folder, writers))
    assert other.read_bytes() == b"of another program"


def test_other_writers_of_this_process_are_left_also_one_folder_below(tmp_path):
    writers, folder, others = [], tmp_path / "logs", [tmp_path / "logs", tmp_path / "logs/other"]

    def open_log(ckpt):
        log = logs_to(folder, writers)(ckpt)
        more = [SummaryWriter(place, filename_suffix=".untracked") for place in others]

        def logs(name, value, at):
            log(name, value, at)
            writers[-1].add_scalars("all", {name: value}, at)
            for writer in more:
                writer.add_scalar("untracked", value, at)
                writer.flush()

        return logs

    killed(tmp_path / "run", open_log, crash_at=6)
    before = [path.read_bytes() for path in sorted(folder.rglob("*.untracked"))]
    train(tmp_path / "run", open_log)
    writers[-1].close()
    after = [path.read_bytes() for path in sorted(folder.rglob("*.untracked"))]
    assert len(before) == len(others)
    assert set(before) <= set(after)
    steps = [step for step, _ in shown(folder / "all_loss")["all"]]
    assert steps == list(range(MICRO_BATCHES))


def test_another_run_of_the_same_host_and_process_id_is_left(tmp_path):
    """As containers have them that all have one name, and whose first process is the training."""
    writers, folder = [], tmp_path / "logs"
    killed(tmp_path / "run", logs_to(folder, writers), crash_at=6)
    own = set(folder.iterdir())
    train(tmp_path / "other", logs_to(folder, writers))
    writers[-1].close()
    other = {path: path.read_bytes() for path in set(folder.iterdir()) - own}
    train(tmp_path / "run", logs_to(folder, writers))
    assert {path: path.read_bytes() for path in other} == other


def test_a_second_attempt_in_one_process_goes_on_with_the_same_writer(tmp_path, straight):
    writer = SummaryWriter(tmp_path / "logs")
    writer.add_text("script", "text before training")

    def open_log(ckpt):
        return ckpt.track_run(writer).add_scalar

    with_three_kills(tmp_path / "run", open_log)
    writer.close()
    assert shown(tmp_path / "logs") == same_as(straight)


def test_what_was_cut_off_is_kept_beside_it(tmp_path):
    writers, folder = [], tmp_path / "logs"
    killed(tmp_path / "run", logs_to(folder, writers), crash_at=6)
    (file,) = folder.iterdir()
    writers[0].flush()
    whole = file.read_bytes()
    train(tmp_path / "run", logs_to(folder, writers))
    (aside,) = folder.glob("*after-2*")
    assert file.read_bytes() + aside.read_bytes() == whole
    assert aside.stat().st_size > 0


def test_a_run_that_begins_anew_leaves_the_writer_as_it_is(tmp_path, straight):
    writers, folders = [], iter(tmp_path / f"logs{number}" for number in range(2))
    open_log = logs_to(lambda: next(folders), writers)
    killed(tmp_path / "run", open_log, crash_at=6)
    train(tmp_path / "run", open_log, resume="never")
    writers[-1].close()
    assert shown(tmp_path / "logs1") == same_as(straight)


def test_what_cannot_be_cut_back_is_refused_with_what_to_do(tmp_path):
    store = SimpleNamespace(log_dir="s3://bucket/logs", _get_file_writer=None, filename_suffix="")
    store = type("SummaryWriter", (SimpleNamespace,), {})(**vars(store))
    with Checkpointer(tmp_path / "run", **Parts().tracked()) as ckpt:
        with pytest.raises(ConfigurationError, match=r"s3://bucket/logs cannot be cut back"):
            ckpt.track_run(store)
        with pytest.raises(ConfigurationError, match="list of builtins is no tracker"):
            ckpt.track_run([])


def test_a_disk_that_hangs_costs_the_writer_s_position_and_no_snapshot(tmp_path):
    never = threading.Event()

    def open_log(ckpt):
        writer = SummaryWriter(tmp_path / "logs")
        writer.flush = never.wait
        ckpt.track_run(writer)
        return writer.add_scalar

    with pytest.warns(UserWarning, match=r"may repeat steps in tensorboard.0: .*does the disk"):
        train(tmp_path / "run", open_log)
    never.set()
    tier = LocalTier(tmp_path / "run")
    assert any(one.usable for one in read_catalog(tier, run_id(tier), read_attempts(tier)))


def test_a_save_waits_for_trackers_a_tenth_of_the_time_before_a_deadline():
    limits_s = []
    run = SimpleNamespace(id="", place="", position=limits_s.append)
    for left_s in (None, 5.0, -1.0):
        tracked_run.capture(Captured(), {"one": run}, left_s)
    assert limits_s == [pytest.approx(limit, abs=0.01) for limit in (1.0, 0.5, 0.0)]


def test_unmarked_files_beside_those_of_an_unmarked_snapshot_are_named(tmp_path, caplog):
    """An earlier release marked no file, so an attempt of its own may have written them."""
    writers, folder = [], tmp_path / "logs"
    killed(tmp_path / "run", logs_to(folder, writers), crash_at=6)
    other = folder / "events.out.tfevents.1700000000.elsewhere.1.0"
    other.touch()
    train(tmp_path / "run", logs_to(folder, writers))
    assert f"{other.name} in {folder} may be another writer's, and stays" in caplog.text
