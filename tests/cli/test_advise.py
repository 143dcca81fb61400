"""`trainckpt advise`: from a run, or before the first one."""

from __future__ import annotations

import json

import pytest

from trainckpt.cli.main import main

JOB = ["--gpus", "1024", "--state-gb", "980", "--step-seconds", "4", "--mtbf", "8h"]
JOB += ["--store-gb-s", "5"]


def advised(capsys, *arguments):
    assert main(["advise", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_job_is_advised_with_reasons_losses_and_prices(capsys, tmp_path):
    picture = tmp_path / "loss.png"
    found = advised(capsys, *JOB, "--gpu-hour", "2", "--plot", str(picture))
    assert all(each["reason"] for each in found["options"])
    assert [level["level"] for level in found["levels"]] == ["memory", "partner", "store"]
    expected = found["expected"]
    causes = ("stalls", "rework", "restores", "restarts")
    assert sum(expected[cause] for cause in causes) == pytest.approx(expected["lost"])
    assert expected["ettr"] == pytest.approx(1 - expected["lost"])
    assert found["lost_gpu_hours_a_day"] == pytest.approx(expected["lost"] * 1024 * 24)
    assert found["lost_price_a_day"] == pytest.approx(2 * found["lost_gpu_hours_a_day"])
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert main(["advise", *JOB, "--gpu-hour", "2"]) == 0
    printed = capsys.readouterr().out
    assert "memory_every" in printed
    assert "each day: " in printed
    assert " at 2 an hour" in printed


def test_a_run_is_advised_by_its_own_saves(make_run, capsys):
    run = make_run(steps=6)
    found = advised(capsys, str(run), "--mtbf", "1h", "--gpus", "16")
    (level,) = found["levels"]
    assert level["level"] == "local"
    assert level["failures_per_s"] == pytest.approx(1 / 3600)
    assert 0 < level["stall_s"] < 60
    assert [each["option"] for each in found["options"]] == ["every", "stop_at", "grace"]
    assert found["gpus"] == 16
    assert found["lost_now"] >= found["expected"]["lost"]


def test_what_a_run_measures_cannot_be_named_beside_it(make_run, capsys):
    run = make_run(steps=2)
    assert main(["advise", str(run), "--state-gb", "3"]) == 78
    assert "state_gb cannot be named with it" in capsys.readouterr().err
    assert main(["advise", str(run.parent / "nowhere")]) == 66
    capsys.readouterr()
    assert main(["advise"]) == 78
    assert "--gpus N --state-gb GB" in capsys.readouterr().err
