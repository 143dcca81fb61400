"""Who we are among the ranks."""

from __future__ import annotations

import pytest

from trainckpt.errors import ConfigurationError
from trainckpt.ranks import current_world


def test_a_plain_script_is_one_rank(monkeypatch):
    """No launcher, no process group."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = current_world()
    assert (world.rank, world.size, world.local_rank) == (0, 1, 0)
    assert world.host


def test_torchrun_with_one_process_is_one_rank(monkeypatch):
    """A process group is not needed for that."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert current_world().size == 1


def test_several_launched_processes_without_a_group_are_refused(monkeypatch):
    """Each would train and save alone otherwise."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match="init_process_group before Checkpointer"):
        current_world()


def test_a_world_size_that_is_no_number_is_refused(monkeypatch):
    """It names the variable."""
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE"):
        current_world()
