"""A Ray worker knows its run directory, and what a drain means for it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainckpt.attempt import launch
from trainckpt.errors import ConfigurationError
from trainckpt.integrations import ray_report, ray_session
from trainckpt.notice import OF_MACHINE


@dataclass(frozen=True)
class Drain:
    """The fields of Ray's PreemptionInfo that a notice is made of."""

    deadline_ms: int | None
    preempted_ranks: tuple[int, ...]


@pytest.mark.parametrize(
    ("run", "kind", "folder", "place"),
    [
        ("trainckpt", "local", "/mnt/results/gpt", "/mnt/results/gpt/trainckpt"),
        ("a/b", "s3", "bucket/results/gpt", "s3://bucket/results/gpt/a/b"),
        ("trainckpt", "gcs", "bucket/gpt", "gs://bucket/gpt/trainckpt"),
        ("trainckpt", "abfs", "container/gpt", "abfs://container/gpt/trainckpt"),
        ("/mnt/runs/x", "s3", "bucket/gpt", "/mnt/runs/x"),
        ("~/runs/x", "local", "/mnt/results/gpt", "~/runs/x"),
        ("s3://other/x", "local", "/mnt/results/gpt", "s3://other/x"),
    ],
)
def test_a_relative_run_lies_in_the_folder_of_the_ray_run(run, kind, folder, place):
    assert ray_session.run_at(run, kind, folder) == place


def test_a_storage_without_a_tier_is_refused_with_what_to_name_instead():
    with pytest.raises(ConfigurationError) as refused:
        ray_session.run_at("trainckpt", "py::fsspec+memory", "results/gpt")
    assert "py::fsspec+memory" in refused.value.message
    assert "absolute path" in refused.value.hint
    assert ray_session.run_at("/mnt/x", "py::fsspec+memory", "results/gpt") == "/mnt/x"


def test_a_drain_stops_all_ranks_by_its_deadline_and_names_whose_node_leaves():
    drain = Drain(deadline_ms=1_030_000, preempted_ranks=(1,))
    other, own = (ray_session.notice_of(drain, rank, now_s=1000.0) for rank in (0, 1))
    assert own.seconds_left == other.seconds_left == 30.0
    assert own.reason.startswith(OF_MACHINE)
    assert not other.reason.startswith(OF_MACHINE)
    assert "rank 1" in other.reason


def test_a_drain_of_the_past_leaves_no_time_and_one_without_deadline_what_ray_waits():
    assert ray_session.notice_of(Drain(1_000, (0,)), 0, now_s=1000.0).seconds_left == 0.0
    waits_s = ray_session.notice_of(Drain(None, (0,)), 0, now_s=1000.0).seconds_left
    assert waits_s == ray_session.UNKNOWN_DEADLINE_S


def test_a_drain_is_reported_once_and_again_with_an_earlier_deadline():
    drains = [None, Drain(60_000, (0,)), Drain(60_000, (0,)), Drain(20_000, (0,))]
    reads = iter(drains)
    source = ray_session.DrainNotices(lambda: next(reads), rank=0, now=lambda: 10.0)
    assert [[n.seconds_left for n in source.poll()] for _ in drains] == [[], [50.0], [], [10.0]]


@pytest.mark.parametrize(
    ("reason", "goes_on"),
    [
        ("Ray drains this node", True),
        ("the node of rank 1 is drained by Ray", True),
        ("AWS will interrupt this instance", True),
        ("trainckpt pause", False),
        ("the wall time ends", False),
    ],
)
def test_a_stop_goes_on_elsewhere_only_if_a_machine_leaves(reason, goes_on):
    assert ray_session.is_preemption(reason) is goes_on


def test_a_ray_worker_is_no_torchrun_rank_and_lacks_no_supervisor():
    worker = {launch.RAY_VARIABLE: "01000000", "RANK": "0", "SLURM_PROCID": "0"}
    assert launch.kind_of_launch(worker) == launch.RAY
    assert launch.missing_supervisor(worker) == []
    inside = {**worker, "TORCHELASTIC_RUN_ID": "x"}
    assert launch.kind_of_launch(inside) == launch.TORCHRUN


def test_a_run_of_ray_is_resumed_by_its_driver_and_not_by_the_worker_s_command():
    facts = {"argv": ["python", "default_worker.py"], "launch": {"kind": "ray", "nproc": 2}}
    with pytest.raises(ConfigurationError, match="driver script") as refused:
        launch.recorded_command(facts)
    assert "storage_path" in refused.value.hint


def test_a_checkpoint_for_ray_names_run_and_snapshot(tmp_path):
    text = json.dumps({"run": "s3://bucket/x", "snapshot": "s2~1.3"})
    (tmp_path / ray_report.NAME).write_text(text)
    assert ray_report.read_pointer(tmp_path) == ("s3://bucket/x", "s2~1.3")


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"run": 1, "snapshot": "s1"}', "[" * 9999])
def test_a_checkpoint_made_otherwise_names_none(tmp_path, text):
    if text is not None:
        (tmp_path / ray_report.NAME).write_text(text)
    with pytest.raises(ConfigurationError, match="names no snapshot") as refused:
        ray_report.read_pointer(tmp_path)
    assert "ckpt.report" in refused.value.hint


class Files:
    """A file system with the two methods of pyarrow's that are used; it notes what is read."""

    def __init__(self):
        self.read = []

    def get_file_info(self, paths):
        return [self._info(Path(path)) for path in paths]

    def _info(self, path):
        kind = "File" if path.is_file() else "Directory" if path.is_dir() else "NotFound"
        return SimpleNamespace(is_file=path.is_file(), type=SimpleNamespace(name=kind))

    def open_input_stream(self, path):
        self.read.append(path)
        return Path(path).open("rb")


@pytest.fixture
def report(tmp_path):
    """Report a checkpoint with files; return it."""
    files = Files()

    def make(name, **contents):
        (tmp_path / name).mkdir()
        for file, text in contents.items():
            (tmp_path / name / file.replace("_", ".")).write_text(text)
        return SimpleNamespace(path=str(tmp_path / name), filesystem=files)

    return make


def pointer(run, snapshot):
    return {"trainckpt_json": json.dumps({"run": run, "snapshot": snapshot})}


def test_snapshots_named_by_checkpoints_are_read_once_and_without_other_files(report):
    first, other, own = (
        report("first", **pointer("run", "s1~1.1"), weights_pt="large"),
        report("other", **pointer("another run", "s9~1.1")),
        report("own", weights_pt="large"),
    )
    snapshots = ray_report.ReportedSnapshots("run")
    assert snapshots.read([first, other, own]) == {"s1~1.1"}
    second = report("second", **pointer("run", "s2~1.1"))
    assert snapshots.read([first, other, own, second]) == {"s1~1.1", "s2~1.1"}
    assert snapshots.read([second]) == {"s2~1.1"}
    named = [Path(path).parent.name for path in first.filesystem.read]
    assert named == ["first", "other", "second"]


@pytest.mark.parametrize("damage", ["damaged", "deleted"])
def test_an_unreadable_checkpoint_is_warned_of_once_and_ends_nothing(report, caplog, damage):
    good, bad = report("good", **pointer("run", "s1~1.1")), report("bad", trainckpt_json="")
    if damage == "deleted":
        shutil.rmtree(bad.path)
    snapshots = ray_report.ReportedSnapshots("run")
    assert snapshots.read([good]) == {"s1~1.1"}
    assert snapshots.read([good, bad]) is None
    assert snapshots.read([good, bad]) is None
    assert caplog.text.count("are not pruned") == 1
    assert bad.path in caplog.text
    assert snapshots.read([good]) == {"s1~1.1"}


def test_outside_a_worker_the_checkpointer_is_refused():
    pytest.importorskip("ray")
    assert launch.RAY_VARIABLE not in os.environ
    with pytest.raises(ConfigurationError, match="no worker of Ray Train") as refused:
        ray_session.train_context()
    assert "TorchTrainer" in refused.value.hint
