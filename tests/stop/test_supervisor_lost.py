"""A rank whose supervisor was killed stops; where it lives, ended or is unknown, it does not."""

from __future__ import annotations

import json
import subprocess

import pytest

from trainckpt.attempt import status_files
from trainckpt.attempt.options import read_options
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE, namespace_of
from trainckpt.notice import Notice
from trainckpt.ranks.world import World
from trainckpt.stop.notice_sources import REASON, SupervisorLost, further_sources


@pytest.fixture
def tell(tmp_path, monkeypatch):
    """Writes who supervises the launch that this process belongs to."""
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(tmp_path))

    def told(pid: object, namespace: object = namespace_of("self")) -> SupervisorLost:
        word = json.dumps({"pid": pid, "namespace": namespace})
        (tmp_path / status_files.SUPERVISOR_FILE).write_text(word)
        return SupervisorLost(tmp_path)

    return told


def test_a_killed_supervisor_is_a_notice_and_a_living_one_is_none(tell, tmp_path):
    supervisor = subprocess.Popen(["sleep", "600"])
    source = tell(supervisor.pid)
    assert source.poll() == []
    assert status_files.is_supervised()
    supervisor.kill()
    supervisor.wait()
    assert source.poll() == [Notice(REASON)]
    assert not status_files.is_supervised()
    # This process restores the ranks from a dump.
    status_files.write_status(
        tmp_path / status_files.SUPERVISOR_FILE, status_files.this_supervisor()
    )
    assert source.poll() == []


def test_who_is_not_known_is_not_gone(tell, tmp_path):
    assert SupervisorLost(tmp_path).poll() == []
    assert SupervisorLost(tmp_path / "removed").poll() == []
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert tell(ended.pid).poll() == [Notice(REASON)]
    assert tell(ended.pid, "pid:[1]").poll() == []  # numbers of another container
    for pid in (0, -1, True, "1", None, 2**40):
        assert tell(pid).poll() == []
    (tmp_path / status_files.SUPERVISOR_FILE).write_text("[")
    assert SupervisorLost(tmp_path).poll() == []


def test_one_rank_of_each_host_looks_for_its_supervisor(tmp_path):
    options = read_options({"notices": "none"}, {})
    told = {SUPERVISOR_VARIABLE: str(tmp_path)}

    def looks(world: World, environment: dict[str, str]) -> bool:
        found = further_sources(options, None, world, environment)
        return any(isinstance(source, SupervisorLost) for source in found)

    assert looks(World(0, 4, 0, "a"), told)
    assert not looks(World(1, 4, 1, "a"), told)
    assert looks(World(2, 4, 0, "b"), told)
    assert not looks(World(0, 4, 0, "a"), {})
