"""`trainckpt simulate`: what is asked for, printed and refused."""

from __future__ import annotations

import json
import sys

import pytest

from trainckpt.cli.main import main

JOB = ["--gpus", "64", "--state-gb", "40", "--step-seconds", "2", "--repeat", "2"]


def simulated(capsys, *arguments):
    assert main(["simulate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_system_says_where_the_time_went(capsys):
    found = simulated(capsys, *JOB, "--days", "2", "--mtbf", "3h", "--spares", "2")
    assert found["systems"][0]["system"] == "trainckpt"
    assert (found["gpus"], found["hosts"], found["mtbf_s"]) == (64, 8, pytest.approx(10_800))
    for row in found["systems"]:
        parts = ("training_s", "rework_s", "stall_s", "restore_s", "downtime_s")
        assert sum(row[part] for part in parts) == pytest.approx(row["wall_s"])
        assert row["wall_s"] == pytest.approx(2 * 86_400)
    assert len({json.dumps(row["faults"]) for row in found["systems"]}) == 1


def test_the_table_has_prices_and_what_a_preset_assumes(capsys, tmp_path):
    picture = tmp_path / "lost.png"
    words = ["--preset", "h200-64", "--repeat", "1", "--gpu-hour", "2.5", "--plot", str(picture)]
    assert main(["simulate", *words]) == 0
    printed = capsys.readouterr().out
    assert "64 GPUs on 8 hosts" in printed
    assert "lost GPU hours" in printed
    assert "assumed: 22.5 minutes until a restart restores" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_options_change_parts_of_a_preset(capsys):
    words = ["--preset", "h200-64", "--systems", "async", "--repeat", "1", "--steps", "200"]
    slow, fast = simulated(capsys, *words), simulated(capsys, *words, "--replace", "1min")
    assert slow["systems"][0]["levels"][0]["every_steps"] == 100
    assert slow["systems"][0]["steps"] == fast["systems"][0]["steps"] == 200
    often = simulated(capsys, *words, "--every", "store=10min")
    assert often["systems"][0]["levels"][0]["every_s"] == pytest.approx(600, rel=0.02)


def test_a_trace_gives_the_faults(capsys, tmp_path):
    trace = tmp_path / "faults.jsonl"
    trace.write_text('{"at": "1 h", "kind": "host"}\n\n{"at": 7200, "kind": "rank"}\n')
    found = simulated(capsys, *JOB, "--steps", "9000", "--trace", str(trace), "--repeat", "1")
    assert {json.dumps(row["faults"], sort_keys=True) for row in found["systems"]} == {
        '{"host": 1, "rank": 1}'
    }
    assert {row["expected_ettr"] for row in found["systems"]} == {None}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the number of GPUs or the size of the state is missing"),
        ([*JOB, "--gpus", "0"], "a cluster without GPUs"),
        ([*JOB, "--systems", "magic"], "no system 'magic' is known"),
        ([*JOB, "--every", "store=soon"], "--every store=soon is no interval"),
        ([*JOB, "--faults", "meteor=1"], "'meteor' is none of rank, host"),
        ([*JOB, "--mtbf", "often"], "'often' is not a duration"),
        ([*JOB, "--trace", "missing.jsonl"], "missing.jsonl is not readable"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(capsys, words, says):
    assert main(["simulate", *words]) == 78
    assert says in capsys.readouterr().err


def test_a_job_that_faults_never_let_finish_is_given_up(capsys):
    words = [*JOB, "--steps", "200", "--mtbf", "20s", "--systems", "synchronous"]
    assert main(["simulate", *words]) == 0
    assert "synchronous: only " in capsys.readouterr().err


@pytest.mark.parametrize("package", ["simpy", "matplotlib"])
def test_a_missing_package_is_named_with_the_line_to_install_it(
    capsys, monkeypatch, tmp_path, package
):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "trainckpt.planning.simulation", raising=False)
    assert main(["simulate", *JOB, "--steps", "50", "--plot", str(tmp_path / "lost.png")]) == 78
    said = capsys.readouterr().err
    assert f"needs the package {package}, which is not installed" in said
    assert "pip install 'trainckpt[planning]'" in said


def test_a_line_of_a_trace_that_is_no_fault_is_named(capsys, tmp_path):
    trace = tmp_path / "faults.jsonl"
    trace.write_text('{"at": 5, "kind": "host"}\n{"at": 6, "kind": "flood"}\n')
    assert main(["simulate", *JOB, "--trace", str(trace)]) == 78
    assert "line 2 of" in capsys.readouterr().err
