"""`trainckpt doctor`: what is there, what is not, and the cure; nothing is left behind."""

from __future__ import annotations

import json
import os
import threading

import pytest

from trainckpt.attempt import heartbeat
from trainckpt.cli import doctor
from trainckpt.cli.main import main
from trainckpt.encryption import keys
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.snapshot import attempt_history
from trainckpt.storage import fs_probe
from trainckpt.storage.local import LocalTier

MACHINE = [
    "python",
    "torch",
    "torch.distributed",
    "store of the ranks",
    "TCPStore.clone",
    "GPUs",
    "signals",
    "memory",
    "shared memory",
    "cores",
    "encryption",
    "process dumps",
    "dumps of GPU state",
]
PLACE = [
    "run's place",
    "file system",
    "rename",
    "create only",
    "directory sync",
    "flock",
    "O_DIRECT",
    "speed",
    "free space",
    "run",
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A probe that costs nothing."""
    monkeypatch.setattr(doctor, "PROBE_BYTES", 8 << 20)


@pytest.fixture
def no_machine(monkeypatch):
    """Only the place is looked at."""
    monkeypatch.setattr(doctor, "check_host", list)


def told(capsys, *arguments, code=0) -> dict[str, dict]:
    """The items by name, in their order."""
    assert main(["doctor", "--json", *map(str, arguments)]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    for item in found["items"]:
        assert {"name", "ok", "value", "cure"} <= item.keys()
        assert item["value"]
        assert item["ok"] or item["cure"], item
    return {item["name"]: item for item in found["items"]}


def test_this_machine_has_all_that_is_needed(capsys):
    found = told(capsys)
    assert list(found) == MACHINE
    for name in ("python", "torch", "torch.distributed", "store of the ranks", "signals"):
        assert found[name]["ok"], found[name]
    assert found["signals"]["value"] == "SIGTERM is heard"
    assert main(["doctor"]) == 0
    assert "all needed features are available" in capsys.readouterr().out


def test_what_the_options_name_for_encryption_is_looked_at(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "check_machine", list)
    monkeypatch.setattr(doctor, "check_dumps", lambda: doctor.DoctorCheck("-", True, "-"))
    path, identity = tmp_path / "id", keys.generate()
    keys.write_identity(path, identity)
    monkeypatch.setenv("TRAINCKPT_ENCRYPT_TO", identity.recipient)
    monkeypatch.setenv("TRAINCKPT_IDENTITY", str(path))
    found = told(capsys)
    assert "AES-256-GCM at" in found["encryption"]["value"]
    assert found["recipients"]["value"] == identity.recipient
    assert found["identity"]["value"].endswith(identity.recipient)
    path.chmod(0o640)
    assert told(capsys, code=1)["identity"]["cure"] == f"chmod 600 {path}"
    path.write_text("nothing")
    assert "holds no identity" in told(capsys, code=1)["identity"]["value"]
    monkeypatch.setenv("TRAINCKPT_ENCRYPT_TO", identity.recipient[:-1])
    assert "is no trainckpt-recipient" in told(capsys, code=1)["recipients"]["value"]
    monkeypatch.setattr("trainckpt.encryption.keys.find_spec", lambda name: None)
    assert told(capsys, code=1)["encryption"]["cure"] == "pip install 'trainckpt[crypto]'"
    for name in ("TRAINCKPT_ENCRYPT_TO", "TRAINCKPT_IDENTITY"):
        monkeypatch.delenv(name)
    assert not told(capsys)["encryption"]["ok"]


def test_a_run_is_looked_at_and_nothing_is_left_in_it(make_run, capsys, no_machine):
    run = make_run(steps=2)
    before = sorted(run.rglob("*"))
    capsys.readouterr()
    found = told(capsys, run)
    assert list(found) == [*PLACE, "newest snapshot", "live attempt"]
    assert all(found[name]["ok"] for name in ("rename", "create only", "free space"))
    assert found["run"]["value"] == attempt_history.run_id(LocalTier(run))
    assert found["newest snapshot"]["value"].startswith("s2~1.2, ")
    assert found["live attempt"]["value"] == "none"
    assert "writes" in found["speed"]["value"]
    assert sorted(run.rglob("*")) == before


def test_a_live_attempt_is_named(make_run, capsys, no_machine):
    tier = LocalTier(make_run(steps=1))
    attempt_history.claim(tier, lambda n: AttemptRecord(n, None))
    heartbeat.path_of(tier, 2).touch()
    capsys.readouterr()
    assert told(capsys, tier.url)["live attempt"]["value"].startswith("attempt 2 is alive")


def test_a_place_that_is_not_there_yet_is_tried_in_its_parent_and_not_made(
    tmp_path, capsys, no_machine
):
    found = told(capsys, tmp_path / "new" / "run")
    assert list(found) == PLACE
    assert found["run's place"]["value"].startswith(f"{tmp_path} can be read and written; ")
    assert found["run"]["value"] == "none yet"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_a_file_is_refused_with_a_cure(tmp_path, capsys, no_machine):
    (tmp_path / "file").touch()
    for target in ("file", "file/run"):
        found = told(capsys, tmp_path / target, code=1)
        assert list(found) == ["run's place"]
        assert "Not a directory" in found["run's place"]["value"]
    assert main(["doctor", str(tmp_path / "file")]) == 1
    shown = capsys.readouterr().out
    assert "FAILS" in shown
    assert "needed but missing: run's place" in shown


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="gives root away, so needs it")
def test_a_place_that_cannot_be_written_is_refused(make_run):
    run = make_run(steps=1)
    for path in (*run.parents[:2], run):
        path.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setuid(65534)
            code = doctor.FAILED if not next(doctor.check_place(LocalTier(run))).ok else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == doctor.FAILED


def test_a_file_system_on_which_nothing_can_be_committed_fails(
    tmp_path, capsys, monkeypatch, no_machine
):
    poor = fs_probe.Capabilities("strange", False, "", False, False, False, False, 10)
    monkeypatch.setattr(fs_probe, "measure", lambda folder: poor)
    found = told(capsys, tmp_path, code=1)
    needed = [name for name, item in found.items() if not item["ok"] and item["needed"]]
    lacks = [name for name, item in found.items() if not item["ok"] and not item["needed"]]
    assert needed == ["rename", "create only"]
    assert lacks == ["directory sync", "flock", "O_DIRECT", "speed"]
    assert found["speed"]["value"] == "no room to measure it"


def test_a_disk_with_no_room_for_the_next_snapshots_fails(
    make_run, capsys, monkeypatch, no_machine
):
    run = make_run(steps=1)
    full = fs_probe.Capabilities("ext4", True, "link", True, True, True, True, 5000)
    monkeypatch.setattr(fs_probe, "measure", lambda folder: full)
    capsys.readouterr()
    assert told(capsys, run, code=1)["free space"]["cure"] == "free space there, or lower keep_last"


def test_a_run_of_which_nothing_is_usable_fails_and_one_without_commits_does_not(
    make_run, tmp_path, capsys, no_machine
):
    run = make_run(steps=1)
    for file in run.glob("snapshots/*/*.safetensors"):
        file.unlink()
    attempt_history.found_run(LocalTier(tmp_path / "new"))
    capsys.readouterr()
    found = told(capsys, run, code=1)["newest snapshot"]
    assert found["value"] == "none is usable"
    assert "trainckpt list" in found["cure"]
    assert told(capsys, tmp_path / "new")["newest snapshot"]["value"] == "none yet"


def test_a_damaged_record_of_the_run_fails(make_run, capsys, no_machine):
    run = make_run(steps=1)
    (run / "run.json").unlink()
    capsys.readouterr()
    assert "run.json is missing" in told(capsys, run, code=1)["run"]["value"]


def test_off_the_main_thread_signals_are_not_heard_and_the_cure_is_named():
    found = []
    thread = threading.Thread(target=lambda: found.append(doctor.check_signals()))
    thread.start()
    thread.join()
    assert not found[0].ok
    assert not found[0].needed
    assert "main thread" in found[0].cure
