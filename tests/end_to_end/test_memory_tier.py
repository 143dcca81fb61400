"""What was saved is found again in this host's memory: nearer than the run's place, not truer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.end_to_end.training import attempt, content_bytes, crashed, record, usable
from trainckpt.cli.main import main
from trainckpt.storage import shared_memory
from trainckpt.storage.shared_memory import ROOT_VARIABLE, SharedMemoryDir

CRASH_AT = 9  # two saves before it, and the window open


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The end of the run that never stopped."""
    parts, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=3)
    return parts.state()


def held(place):
    """Shard files of the run in memory, by snapshot."""
    found = SharedMemoryDir.found(str(place))
    return {f: next((found.root / f).iterdir()) for f in found.folders()} if found else {}


def flip(path, at):
    data = bytearray(Path(path).read_bytes())
    data[at if at >= 0 else at + content_bytes(path)] ^= 1
    Path(path).write_bytes(data)


def test_a_crashed_run_goes_on_from_memory_even_where_its_file_is_spoilt(
    tmp_path, straight, caplog
):
    crashed(tmp_path, CRASH_AT, epochs=3)
    newest = usable(tmp_path)[-1]
    file = next((tmp_path / "snapshots" / newest).glob("*.safetensors"))
    in_memory = held(tmp_path)[f"snapshots/{newest}"].read_bytes()  # which may be longer
    assert in_memory[: file.stat().st_size] == file.read_bytes()
    flip(file, -1)
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, ckpt = attempt(tmp_path, epochs=3)
    assert f"{newest} was read from memory" in caplog.text
    assert str(ckpt._attempt.beginning.manifest.name) == newest
    assert parts.state() == straight


@pytest.mark.parametrize("at", [20, 5000, -1])
def test_memory_that_does_not_match_its_digests_is_passed_over(tmp_path, straight, caplog, at):
    crashed(tmp_path, CRASH_AT, epochs=3)
    newest = usable(tmp_path)[-1]
    flip(held(tmp_path)[f"snapshots/{newest}"], at)
    parts, ckpt = attempt(tmp_path, epochs=3)
    assert f"{newest} is damaged in memory" in caplog.text
    assert str(ckpt._attempt.beginning.manifest.name) == newest
    assert parts.state() == straight


def test_a_run_that_is_finished_gives_its_memory_back(tmp_path):
    attempt(tmp_path)
    assert SharedMemoryDir.found(str(tmp_path)) is None


def test_a_run_that_goes_on_uses_the_arenas_of_the_attempt_before(tmp_path):
    crashed(tmp_path, CRASH_AT, epochs=3)
    crashed(tmp_path, CRASH_AT + 5, epochs=3)
    memory = SharedMemoryDir.found(str(tmp_path))
    assert len(list((memory.root / "arenas").iterdir())) == 2
    assert all(folder.partition("~")[2].startswith("2.") for folder in held(tmp_path))
    assert main(["prune", str(tmp_path)]) == 0
    assert SharedMemoryDir.found(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("root", "budget", "said"),
    [
        (None, "40 %", "2 x "),
        ("none", "40 %", "private memory"),
        (None, "1 kb", "training waits while each file is written"),
    ],
)
def test_a_run_is_exact_in_whatever_memory_there_is_and_says_which(
    tmp_path, straight, caplog, monkeypatch, root, budget, said
):
    if root is not None:
        monkeypatch.setenv(ROOT_VARIABLE, root)
    with caplog.at_level(logging.DEBUG, "trainckpt"):
        crashed(tmp_path, CRASH_AT, epochs=3, memory_budget=budget)
        parts, _ = attempt(tmp_path, epochs=3, memory_budget=budget)
    assert said in caplog.text
    assert parts.state() == straight
    assert record(tmp_path, 2)["outcome"]["outcome"] == "finished"


def test_where_shared_memory_is_small_copies_are_made_beside_training_all_the_same(
    tmp_path, straight, caplog, monkeypatch
):
    """Nobody holds the memory for it, so it ends with the process."""
    monkeypatch.setattr(shared_memory, "_ROOM_BYTES", 1 << 60)
    descriptors = set()

    def inside(ckpt, _):
        descriptors.add(ckpt._attempt.saver.arenas.descriptor)

    with caplog.at_level(logging.INFO, "trainckpt"):
        crashed(tmp_path, CRASH_AT, epochs=3)
        assert held(tmp_path) == {}
        parts, _ = attempt(tmp_path, epochs=3, every="1 steps", inside=inside)
    assert parts.state() == straight
    assert "MB of private memory, so no copy outlives the process" in caplog.text
    assert "was read from memory" not in caplog.text
    assert len(descriptors - {None}) == 2, "one is filled while the other is read"


def test_memory_whose_folder_is_taken_away_stops_nothing(tmp_path, straight):
    def take_away(ckpt, _):
        memory = SharedMemoryDir.found(str(tmp_path))
        if memory is not None and ckpt.cursor.micro_batches == CRASH_AT:
            memory.remove()

    parts, _ = attempt(tmp_path, epochs=3, inside=take_away)
    assert parts.state() == straight
