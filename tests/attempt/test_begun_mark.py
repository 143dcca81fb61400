"""A restart by torchrun finds out that its agent's ranks have begun nothing; else it does not."""

from __future__ import annotations

import pytest
from torch import nn

from trainckpt import Checkpointer
from trainckpt.attempt.begun_mark import MARK, began_nothing, leave_mark
from trainckpt.errors import NothingToResume


def rank(logs, restarts):
    """The variables of an agent's rank, and the folder that torchrun makes for it."""
    error_file = logs / f"attempt_{restarts}" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    return {
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def test_a_restart_after_ranks_that_died_in_start_up_is_a_first_start(tmp_path):
    rank(tmp_path, 0)
    second = rank(tmp_path, 1)
    assert began_nothing(second)
    leave_mark(second)
    assert not began_nothing(rank(tmp_path, 2))


@pytest.mark.parametrize("requeued", [False, True])
def test_a_job_that_slurm_requeued_is_a_restart_also_where_torchrun_s_ranks_began_nothing(
    tmp_path, monkeypatch, requeued
):
    """The first ranks are refused, as the run's folder is not mounted, and torchrun tries again."""
    rank(tmp_path / "logs", 0)
    variables = rank(tmp_path / "logs", 1) | ({"SLURM_RESTART_COUNT": "1"} if requeued else {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ckpt = Checkpointer(tmp_path / "run", model=nn.Linear(1, 1))
    if requeued:
        with pytest.raises(NothingToResume, match="SLURM_RESTART_COUNT=1"), ckpt:
            pass
    else:
        with ckpt:
            pass


def test_what_is_not_known_is_no_first_start(tmp_path):
    assert not began_nothing({})
    assert not began_nothing(rank(tmp_path / "cleaned", 3))
    rank(tmp_path, 0)
    elsewhere = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_ERROR_FILE": "/dev/null"}
    assert not began_nothing(elsewhere)
    assert not began_nothing({**rank(tmp_path, 1), "TORCHELASTIC_RESTART_COUNT": "2"})


@pytest.mark.parametrize("variables", [{}, {"TORCHELASTIC_ERROR_FILE": "error.json"}])
def test_where_there_is_no_torchrun_no_mark_is_left(tmp_path, monkeypatch, variables):
    monkeypatch.chdir(tmp_path)
    leave_mark(variables)
    assert [path.name for path in tmp_path.rglob(MARK)] == []
