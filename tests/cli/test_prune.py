"""`trainckpt prune`: what goes, what stays in any case, and that a live run does not notice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.process_dump.test_restore import RECORD
from tests.snapshot.written import written
from trainckpt.attempt import heartbeat
from trainckpt.cli.main import main
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.dump import DumpName, WrittenFile
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir


def pruned(capsys, *argv) -> dict:
    """What `prune --json` says."""
    capsys.readouterr()
    assert main(["prune", "--json", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def there(run) -> set[str]:
    return {path.name for path in (run / "snapshots").iterdir()}


def test_the_older_ones_go_and_the_newest_and_the_tagged_stay(make_run, capsys):
    run = make_run(steps=4, tag="best")
    said = pruned(capsys, run, "--keep-last", "1")
    assert there(run) == {"s4~1.5", "s1~1.2"}
    assert [row["name"] for row in said["pruned"]] == ["s3~1.4", "s2~1.3", "s1~1.1"]
    assert {row["reason"] for row in said["pruned"]} == {"older than the 1 kept"}
    assert said["kept"] == ["s4~1.5", "s1~1.2"]
    assert said["bytes"] == sum(row["bytes"] for row in said["pruned"]) > 0
    assert main(["verify", str(run)]) == 0


def test_as_many_are_kept_as_the_run_itself_keeps(make_run, capsys):
    run = make_run(steps=4)  # it keeps 50
    assert pruned(capsys, run)["pruned"] == []


def test_a_dry_run_says_the_same_and_deletes_nothing(make_run, capsys):
    run = make_run(steps=3)
    before = there(run)
    said = pruned(capsys, run, "--keep-last", "1", "--dry-run")
    assert there(run) == before
    assert main(["prune", str(run), "--keep-last", "1", "--dry-run"]) == 0
    assert "2 would go, 1 stay" in capsys.readouterr().out
    assert pruned(capsys, run, "--keep-last", "1")["pruned"] == said["pruned"]


def test_abandoned_branches_go_only_where_that_is_asked_for(make_run, capsys):
    run = make_run(steps=3)
    make_run(steps=2, at="s1")
    assert pruned(capsys, run)["pruned"] == []
    said = pruned(capsys, run, "--abandoned")
    assert there(run) == {"s1~1.1", "s2~2.1"}
    assert {row["reason"] for row in said["pruned"]} == {"abandoned branch"}


def test_what_a_live_attempt_has_not_committed_stays_and_dead_files_go(make_run, capsys):
    run = make_run(steps=1)
    tier = LocalTier(run)
    attempt_history.claim(tier, lambda n: AttemptRecord(n, "s1~1.1", "running"))
    for name in ("s9~1.9", "s5~2.1"):
        written(tier, name)
    heartbeat.path_of(tier, 2).touch()
    said = pruned(capsys, run)
    assert [row["name"] for row in said["pruned"]] == ["s9~1.9"]
    heartbeat.path_of(tier, 2).unlink()
    said = pruned(capsys, run)
    assert [row["name"] for row in said["pruned"]] == ["s5~2.1"]
    assert there(run) == {"s1~1.1"}


def test_what_a_live_attempt_is_reading_stays(make_run, capsys):
    run = make_run(steps=3)
    tier = LocalTier(run)
    attempt_history.claim(tier, lambda n: AttemptRecord(n, facts={"reading": "s1~1.1"}))
    heartbeat.path_of(tier, 2).touch()
    said = pruned(capsys, run, "--keep-last", "1", "--abandoned")
    assert [row["name"] for row in said["pruned"]] == ["s2~1.2"]
    assert "has not chosen its snapshot yet" in said["notes"][0]


def test_a_run_that_is_pruned_while_it_trains_goes_on_saving(make_run, capsys):
    seen = []

    def prune_now(run, step):
        if step == 4:
            seen.append(main(["prune", "--json", "--keep-last", "1", "--abandoned", str(run)]))

    run = make_run(steps=6, each=prune_now)
    assert seen == [0]
    assert {"s3~1.3", "s4~1.4", "s5~1.5", "s6~1.6"} >= there(run)
    assert "s1~1.1" not in there(run)
    assert main(["verify", str(run)]) == 0


def test_a_damaged_snapshot_stays(make_run, capsys):
    run = make_run(steps=2)
    (run / "snapshots/s1~1.1/manifest.json").write_bytes(b"{}")
    assert pruned(capsys, run, "--keep-last", "1", "--abandoned")["pruned"] == []


def test_memory_that_dumped_processes_have_open_stays_until_no_resume_brings_them_back(
    make_run, capsys
):
    run = make_run(steps=2)
    place, tier = SharedMemoryDir.of(str(run)), LocalTier(run)
    arena = place.arena(0, 0)
    arena.reserve(5000)
    arena.close()
    dump = replace(
        RECORD,
        name=DumpName(1, 9),
        run=attempt_history.run_id(tier),
        written=(WrittenFile(str(arena.path), 5000),),
    )
    (run / dump.name.folder).mkdir(parents=True)
    tier.replace(dump.name.record, dump.dump())
    assert main(["prune", str(run)]) == 0
    assert "of this host's memory stay: the processes of dump~1.9" in capsys.readouterr().out
    assert arena.path.exists()
    attempt_history.claim(tier, lambda number: AttemptRecord(number, None))
    assert main(["prune", str(run)]) == 0
    assert "of this host's memory were given back" in capsys.readouterr().out
    assert not place.root.exists()


def test_an_unknown_run_is_66(tmp_path, capsys):
    assert main(["prune", "--json", str(tmp_path / "none")]) == 66


@pytest.mark.parametrize("number", ["0", "-1", "all"])
def test_a_number_to_keep_is_from_1_on(tmp_path, number, capsys):
    assert main(["prune", str(tmp_path), "--keep-last", number]) == 78
