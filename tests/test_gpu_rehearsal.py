"""`make gpu`, rehearsed on the CPU: every stage runs, and says what only a card can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from benchmarks.gpu.__main__ import FAILED, PASSED, STAGES, judge, table
from benchmarks.gpu.facts import pcie_link
from benchmarks.gpu.findings import NEEDS_CARD, Findings

from tests.long_cases import long

NUMBER = (int, float)
FIGURES = {
    "A": {"python": str, "torch": str, "kernel": str, "cores": int, "host_memory": int},
    "B": {
        "pinned": NUMBER,
        "registered": NUMBER,
        "registered_bytes_equal": bool,
        "pageable": NUMBER,
        "small_one_by_one": NUMBER,
        "small_packed": NUMBER,
        "small_by_trainckpt": NUMBER,
        "small_bytes_equal": bool,
        "register_per_gb": NUMBER,
        "launch_gap_quiet": NUMBER,
        "launch_gap_while_registering": NUMBER,
    },
    "C": {"files": int, "tests": int, "failed": list},
    "D": {"captured": bool},
    "E": {
        "disk_write": NUMBER,
        "floor_copy": NUMBER,
        "stall_overlap": NUMBER,
        "slowdown": NUMBER,
        "stall_plain": NUMBER,
        "stall beside torch.save": NUMBER,
        "rows": list,
    },
    "F": {},
    "G": {
        "tf32": bool,
        "replicas": NUMBER,
        "replicas_sees_a_byte": bool,
        "growth": NUMBER,
        "memory": NUMBER,
        "hanging": NUMBER,
        "hanging_bytes_equal": bool,
        "visible": bool,
    },
}
ONLY_ON_A_CARD = {
    "A": {"card", "driver", "link", "dumps_of_gpus"},
    "B": set(),
    "C": {"skipped"},
    "D": {"one_rank", "two_ranks", "nccl"},
    "E": set(),
    "F": {"driver", "driver_beside_nvml"},
    "G": set(),
}
DUMPED = {"kind": str, "restored": bool, "training": bool, "pause_seconds": NUMBER}


def run(tmp_path, *more):
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--json",
        str(out),
        "--device",
        "cpu",
        "--folder",
        str(tmp_path),
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, json.loads(out.read_text())


QUICK = "AB"


@pytest.mark.timeout(600)  # up to seven stages, each of several processes
@pytest.mark.parametrize("stages", [QUICK, *long("".join(STAGES))])
def test_every_stage_runs_on_the_cpu_and_names_what_needs_a_card(tmp_path, stages):
    done, result = run(tmp_path, "--stages", ",".join(stages))
    assert done.returncode == 0, done.stdout + json.dumps(result, indent=1)
    assert result["passed"]
    assert [stage["stage"] for stage in result["stages"]] == list(stages)
    for stage in result["stages"]:
        figures = {one["name"]: one for one in stage["figures"]}
        expected = FIGURES[stage["stage"]]
        if stage["stage"] == "F" and "kind" in figures:  # where there is CRIU
            expected = DUMPED
        for name, kind in expected.items():
            assert isinstance(figures[name]["value"], kind), figures[name]
        needing = {name for name, one in figures.items() if NEEDS_CARD in one["why"]}
        assert needing == ONLY_ON_A_CARD[stage["stage"]]
        assert stage["seconds"] < stage["limit_s"]
    assert done.stdout.splitlines()[-1] == PASSED
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_every_stage_has_a_module_that_can_be_run():
    runs = [import_module(f"benchmarks.gpu.{stage.module}").run for stage in STAGES.values()]
    assert {tuple(signature(run).parameters) for run in runs} == {
        ("findings", "device", "folder", "ends")
    }


def test_without_a_card_no_stage_passes_on_one(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done, result = run(tmp_path, "--device", "cuda", "--stages", "B")
    assert done.returncode == 1
    (stage,) = result["stages"]
    assert stage["status"] == FAILED
    assert "no CUDA device" in stage["figures"][0]["why"]


LIMITED = """
import sys
from pathlib import Path
from benchmarks.gpu.__main__ import run_limited
print(run_limited([sys.executable, "-c", sys.argv[1]], float(sys.argv[2]), Path(sys.argv[3])))
"""
LEAVES_A_SESSION = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep({lasts_s})
"""


@pytest.mark.parametrize(("lasts_s", "limit_s", "code"), [(600, 3, "None"), (0, 60, "0")])
def test_nothing_that_a_stage_has_started_outlives_it(tmp_path, lasts_s, limit_s, code):
    """Also not in a session of its own, as ranks are; at its limit, and if it ends by itself."""
    program, log = LEAVES_A_SESSION.format(lasts_s=lasts_s), tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, program, str(limit_s), str(log)],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.stdout.split() == [code], done.stderr
    assert not Path("/proc", log.read_text().strip()).exists()


@pytest.mark.parametrize(
    ("figures", "code", "expected"),
    [
        ([True, None], 0, (PASSED, "")),
        ([True, False], 0, (FAILED, "figure1")),
        ([True], 1, (FAILED, "ended with 1")),
        ([True], None, (FAILED, "killed at its limit of 5 s")),
        ([], 0, (FAILED, "it has no figures")),
    ],
)
def test_a_stage_passes_only_if_it_ended_well_and_no_figure_failed(figures, code, expected):
    found = [{"name": f"figure{at}", "passed": passed} for at, passed in enumerate(figures)]
    assert judge(found, code, 5.0) == expected


def test_on_a_card_figures_are_judged_and_what_would_need_one_has_failed(tmp_path):
    card, rehearsal = (
        Findings(tmp_path / name, on_card=name == "card") for name in ("card", "rehearsal")
    )
    for findings in (card, rehearsal):
        findings.at_most("fast", 0.5, "s", 1.0)
        findings.at_most("slow", 1.5, "s", 1.0)
        findings.at_most("unknown", None, "s", 1.0)
        findings.at_least("wide", 2.0, "bytes/s", 1.0)
        findings.needs_card("link")
        with findings.attempt("broken"):
            raise ValueError("no such thing")
    passed = {one["name"]: one["passed"] for one in json.loads((tmp_path / "card").read_text())}
    assert passed == {
        "fast": True,
        "slow": False,
        "unknown": False,
        "wide": True,
        "link": False,
        "broken": False,
    }
    judged = [one["name"] for one in rehearsal.figures if one["passed"] is not None]
    assert judged == ["broken"]
    result = {"card": "", "device": "cpu", "machine": "", "started": "", "passed": False}
    stage = {
        "stage": "A",
        "title": "facts",
        "status": FAILED,
        "reason": "slow",
        "seconds": 1.0,
        "limit_s": 2.0,
        "figures": card.figures,
    }
    lines = table({**result, "stages": [stage]}).splitlines()
    assert "  FAIL slow                              1.5 s  (at most 1.0)" in lines
    assert any("broken" in line and "no such thing" in line for line in lines)


def test_a_link_s_payload_is_its_lanes_less_the_heads_of_packets(monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex"):
        monkeypatch.setattr(pynvml, name, lambda *_: None)
    for which in ("Max", "Curr"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{which}PcieLinkGeneration", lambda _: 5)
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{which}PcieLinkWidth", lambda _: 16)
    assert 57e9 < pcie_link()["bytes_per_s"] < 58e9
