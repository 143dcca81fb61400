"""Process groups that cannot be in a dump: taken down at its boundary, and made again after it.

NCCL's need a GPU; gloo's stand in for them, by one line in the scripts that run here. What is taken
down, replaced and made again is the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.campaign import launch
from tests.campaign.cases import Settings
from tests.process_dump.example import SCRIPT, Example, dumped_at_a_boundary
from tests.start_commands.started import Forks, ended

NCCL_SCRIPT = Path(__file__).parent / "nccl_script.py"
TORN_DOWN = Path(__file__).parent / "torn_down.py"


def two_ranks(server, script, flags, log):
    settings, port = Settings("char_gpt", "ddp", 2, 2, 1, 0.1, 2, 2), launch.free_port()
    variables = [launch.rank_variables(settings, rank, port) for rank in range(2)]
    ranks = Forks(server, str(script), flags, log, variables)
    assert ended(ranks) == [0, 0], ranks.said()
    return ranks.said()


def test_under_live_wrappers_groups_are_taken_down_and_made_again_and_nothing_is_noticed(
    server, tmp_path
):
    """DDP, of a group of its own too, FSDP2 on a mesh of two dimensions, tensor parallel. Who else
    holds a group is named instead."""
    said = two_ranks(server, TORN_DOWN, [], tmp_path / "log")
    ranks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(ranks) == 2, said
    for found in ranks:
        for layout in ("ddp", "ddp_of_a_group", "hsdp", "tp"):
            assert found[layout]["same"], (layout, found[layout])
            assert found[layout]["threads"] == [0], (layout, found[layout])
        assert found["ddp"]["buckets"].count(",") >= 1, "several buckets, in an order of their own"
        why = found["refusals"]
        for text, told in zip(
            [
                "the variable group of refusals",
                "the variable inside of refusals",
                "__main__.Holder.group",
                "held by cell",
                "the variable kept of module __main__",
            ],
            why,
            strict=False,
        ):
            assert text in told, why
        assert why[5] == "", why
        assert "communication hook" in why[6], why
        assert "CUDA graphs" in why[7], why
        assert "gc.freeze() hides" in why[8], why
        assert "at different places: [[7, 0], [7, 1]]" in found["disagreement"]


@pytest.mark.parametrize("layout", ["ddp", pytest.param("hsdp", marks=pytest.mark.long)])
def test_a_run_whose_groups_cannot_be_dumped_is_dumped_without_and_is_exact(
    criu_here, server, tmp_path, layout
):
    """Twice: groups that were made anew are taken down as well."""
    hold, flags = tmp_path / "hold", {"parallel": layout, "workers": 0}
    hold.touch()
    straight = Example(tmp_path / "straight", flags=flags)
    two_ranks(server, SCRIPT, straight.flags, straight.folder / "log")
    with Example(tmp_path / "x", flags=flags, HOLD=hold, TAKEN_DOWN="gloo") as run:
        run.start()
        first = dumped_at_a_boundary(run, hold)
        assert "process groups are destroyed for the process dump" in run.said()
        run.resume()
        second = dumped_at_a_boundary(run, hold)
        assert f"restored {first['name']}" in run.said()
        hold.unlink()
        assert run.resume().wait() == 0, run.said()
        assert f"restored {second['name']}" in run.said()
        assert run.trace() == straight.trace()


def nccl_is_dumped(folder, ranks, **variables):
    """A run over NCCL, dumped twice at boundaries, and one that is never stopped."""
    hold, flags = folder / "hold", {"steps": 12}
    with Example(folder / "straight", ranks, flags, **variables) as straight:
        straight.script = NCCL_SCRIPT
        assert straight.start("--dumps", "off").wait() == 0, straight.said()
    hold.touch()
    with Example(folder / "x", ranks, flags, HOLD=hold, **variables) as run:
        run.script = NCCL_SCRIPT
        run.start()
        for _ in range(2):
            record = dumped_at_a_boundary(run, hold, lean=False)
            assert "process groups are destroyed for the process dump" in run.said()
            run.resume()
        hold.unlink()
        assert run.wait() == 0, run.said()
        assert f"restored {record['name']}" in run.said()
        for rank in range(ranks):
            name = f"trace/rank{rank}.txt"
            assert (run.folder / name).read_text() == (straight.folder / name).read_text()
    return record


@pytest.mark.gpu
def test_nccl_is_taken_down_for_a_dump_and_the_run_is_exact(criu_here, gpu_here, tmp_path):
    """Two ranks where there are two GPUs: NCCL gives each rank one of its own."""
    ranks = min(gpu_here.cuda.device_count(), 2)
    record = nccl_is_dumped(tmp_path, ranks, NCCL_NVLS_ENABLE=0, NCCL_CUMEM_HOST_ENABLE=0)
    assert len(record["gpus"]["pids"]) == ranks
