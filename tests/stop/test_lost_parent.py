"""A rank whose supervisor or torchrun was killed stops; where that is not known, it does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trainckpt.attempt import status_files
from trainckpt.attempt.options import read_options
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE, namespace_of
from trainckpt.notice import Notice
from trainckpt.ranks.world import World
from trainckpt.stop.lost_parent import AGENT_REASON, REASON, AgentLost, SupervisorLost
from trainckpt.stop.notice_sources import further_sources

RANK = """
import sys, time
from trainckpt.stop.lost_parent import AgentLost
source = AgentLost()
print(source.poll(), flush=True)
while not (found := source.poll()):
    time.sleep(0.01)
print(found[0].reason, flush=True)
"""
AGENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""


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


def test_an_orphan_of_torchrun_has_a_notice():
    agent = subprocess.Popen([sys.executable, "-c", AGENT, RANK], stdout=subprocess.PIPE, text=True)
    assert agent.stdout.readline() == "[]\n"
    agent.kill()
    agent.wait()
    assert agent.stdout.read() == f"{AGENT_REASON}\n"
    agent.stdout.close()


def test_an_orphan_has_a_notice_though_torchrun_was_killed_before_it_looked():
    waits = "import sys; print(flush=True); sys.stdin.read()\n" + RANK
    command = [sys.executable, "-c", AGENT, waits]
    agent = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert agent.stdout.readline() == "\n"
    agent.kill()
    agent.wait()
    agent.stdin.close()
    assert AGENT_REASON in agent.stdout.readline()
    agent.stdout.close()


def test_a_process_that_leads_no_session_is_no_orphan_of_torchrun():
    """Its parent may end without harm, as a shell's does."""
    script = RANK.split("while", maxsplit=1)[0] + "time.sleep(0.5)\nprint(source.poll())\n"
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", parent, script]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n[]\n"


def test_only_ranks_that_torchrun_started_look_for_it(tmp_path):
    options = read_options({"notices": "none"}, {})
    started = {"TORCHELASTIC_RUN_ID": "x"}
    supervised = {**started, SUPERVISOR_VARIABLE: str(tmp_path)}
    for environment, looks in (({}, False), (started, True), (supervised, False)):
        found = further_sources(options, None, World(0, 1, 0, "a"), environment)
        assert any(isinstance(source, AgentLost) for source in found) is looks
