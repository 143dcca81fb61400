"""The verbs over several tiers: copies are listed, checked, moved, and made good again."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.cli.test_list_and_verify import flip_a_bit, snapshot, told
from trainckpt.cli.main import main
from trainckpt.tiers.memory import MemoryPlace


@pytest.fixture
def tiered(make_run, tmp_path, monkeypatch, capsys):
    """A finished run, and a slower tier that holds its newest snapshot."""
    run, far = make_run(steps=2), tmp_path / "far"
    monkeypatch.setenv("TRAINCKPT_TIERS", str(far))
    capsys.readouterr()
    assert main(["flush", "--json", str(run)]) == 0
    document = told(capsys)
    assert [(t["tier"], t["how"]) for t in document["tiers"]] == [("far", "copied")]
    return run, far, document["snapshot"]


def test_list_tells_which_tiers_hold_each_snapshot_also_when_the_place_is_gone(tiered, capsys):
    run, _, newest = tiered
    assert main(["list", "--json", str(run)]) == 0
    first, *others = told(capsys)["candidates"]
    assert (first["name"], first["tiers"]) == (newest, ["local", "far"])
    assert all(other["tiers"] == ["local"] for other in others)
    assert main(["list", str(run)]) == 0
    assert "local far" in capsys.readouterr().out
    shutil.rmtree(run)
    assert main(["list", "--json", str(run)]) == 0
    (only,) = told(capsys)["candidates"]
    assert (only["name"], only["tiers"], only["usable"]) == (newest, ["far"], True)


def test_verify_reads_every_copy_and_names_the_bad_one_and_flush_and_fetch_repair_it(
    tiered, capsys
):
    run, far, newest = tiered
    assert main(["verify", "--json", str(run)]) == 0
    copies = told(capsys)["copies"]
    assert {c["tier"] for c in copies if c["snapshot"] == newest} == {"local", "far"}
    for place, tier, verb in ((far, "far", "flush"), (run, "local", "fetch")):
        flip_a_bit(next(snapshot(place, newest.partition("~")[0]).glob("*.safetensors")))
        assert main(["verify", "--json", str(run)]) == 65
        bad = [(c["snapshot"], c["tier"]) for c in told(capsys)["copies"] if not c["ok"]]
        assert bad == [(newest, tier)]
        assert main([verb, "--json", str(run)]) == 0
        assert [t["how"] for t in told(capsys)["tiers"]] == ["repaired"]
        assert main(["verify", str(run)]) == 0
        capsys.readouterr()
    assert main(["flush", "--json", f"{run}@{newest}", "--to", "far"]) == 0
    assert [t["how"] for t in told(capsys)["tiers"]] == ["was there"]


def test_a_snapshot_that_is_bad_in_every_copy_is_65_and_nothing_is_left_of_a_try(tiered, capsys):
    run, far, newest = tiered
    for place in (run, far):
        flip_a_bit(next(snapshot(place, newest.partition("~")[0]).glob("*.safetensors")))
    assert main(["verify", "--json", str(run)]) == 65
    assert len([c for c in told(capsys)["copies"] if not c["ok"]]) == 2
    assert main(["flush", str(run), "--to", str(far.parent / "third")]) == 65
    assert "does not match its digest" in capsys.readouterr().err
    assert not list((far.parent / "third").rglob("*.safetensors"))


def test_fetch_makes_a_lost_place_whole_again(tiered, capsys, monkeypatch):
    run, far, newest = tiered
    shutil.rmtree(run)
    monkeypatch.delenv("TRAINCKPT_TIERS")
    assert main(["fetch", "--json", str(run), "--from", str(far)]) == 0
    assert told(capsys)["snapshot"] == newest
    assert main(["list", "--json", str(run)]) == 0
    (only,) = told(capsys)["candidates"]
    assert (only["name"], only["usable"]) == (newest, True)
    assert json.loads((run / "attempts/1.json").read_text())["attempt"] == 1


def test_a_tier_that_does_not_answer_is_69_and_named(tiered, capsys):
    run, far, _ = tiered
    shutil.rmtree(far)
    far.write_text("")
    assert main(["verify", "--json", str(run)]) == 69
    (silent,) = [c for c in told(capsys)["copies"] if not c["ok"]]
    assert (silent["tier"], silent["file"]) == ("far", "")
    assert main(["flush", str(run)]) == 69
    assert main(["flush", str(run), "--to", "far"]) == 69
    assert main(["list", str(run)]) == 0
    assert "the tier far does not answer" in capsys.readouterr().err


def test_what_stands_in_memory_is_a_copy_too(make_run, capsys):
    run = make_run(steps=2)
    memory = MemoryPlace.of(str(run))
    newest = max((run / "snapshots").iterdir())
    folder = memory.root / "snapshots" / newest.name
    folder.mkdir(parents=True, mode=0o700)
    for path in newest.glob("*.safetensors"):
        shutil.copy(path, folder / path.name)
    flip_a_bit(folder / "rank00000.safetensors")
    capsys.readouterr()
    assert main(["verify", "--json", str(run)]) == 65
    (bad,) = [c for c in told(capsys)["copies"] if not c["ok"]]
    assert (bad["tier"], bad["snapshot"]) == ("memory", newest.name)
    memory.remove()
