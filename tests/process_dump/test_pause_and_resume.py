"""Runs that know nothing of checkpoints, dumped by `trainckpt pause` or because of SIGTERM, and
restored by `resume`.

The campaign of 50 pauses is `python -m tests.process_dump.campaign`.
"""

from __future__ import annotations

import json

from tests.process_dump.campaign import of_each_rank, paused_often, straight
from trainckpt.cli.main import main


def test_a_run_that_is_dumped_at_random_instants_prints_what_it_would_have_printed(
    criu_here, tmp_path, rng, capsys
):
    """Two ranks under torchrun, with loaders whose batches lie in shared memory."""
    variables = {"COUNT": 90, "WORKERS": 1, "PAUSE_S": 0.1}
    for name in ("straight", "paused"):
        (tmp_path / name).mkdir()
    reference = straight(tmp_path / "straight", **{**variables, "PAUSE_S": 0})
    assert {rank: len(lines) for rank, lines in of_each_rank(reference).items()} == {
        "0": 91,
        "1": 91,
    }

    paused_often(tmp_path / "paused", reference, 2, rng, **variables)

    run = str(tmp_path / "paused" / "run")
    assert main(["list", "--json", "--attempts", run]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = [(row["id"], row["kind"], row["usable"], row["reason"]) for row in told["candidates"]]
    assert rows == [
        ("dump~2.1", "dump", False, "attempt 3 went on from it and finished"),
        ("dump~1.1", "dump", False, "attempt 2 went on from it and stopped"),
    ]
    parents = [row["parent"] for row in told["attempts"]]
    assert parents == ["dump~2.1", "dump~1.1", "undecided"]
    images = list((tmp_path / "paused" / "run" / "dumps").glob("*/images"))
    assert images == []  # the processes have gone on from them
