"""Where a launch finds the compile caches: every launch on this host in the same folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trainckpt.launcher.supervise import supervise

TELLS = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Launch a command; return the folder of its caches, or None, and what was said."""
    monkeypatch.setenv("TRAINCKPT_CACHE", str(tmp_path / "cache"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # torch sets them when it compiles
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, **environment: str):
        said: list[str] = []
        command = [sys.executable, "-c", TELLS, str(tmp_path / "told"), *arguments]
        cwd = str(tmp_path)
        assert supervise(command, environment=environment, cwd=cwd, say=said.append).exit_code == 0
        told = json.loads((tmp_path / "told").read_text())
        own = told.get("TORCHINDUCTOR_CACHE_DIR")
        if own is not None and "TRITON_CACHE_DIR" in told:
            assert Path(told["TRITON_CACHE_DIR"]).parent == Path(own).parent
            return Path(own).parent, said
        return own, said

    return run


def test_all_commands_share_one_folder_of_this_host(launch, tmp_path):
    folder, said = launch("a")
    assert launch("b") == (folder, said) == (folder, [])
    assert folder.name == "shared"
    assert folder.is_relative_to(tmp_path / "cache")


def test_a_command_with_copies_has_a_folder_of_its_own_at_each_start(launch, tmp_path):
    shared, _ = launch("a")
    own, _ = launch("a", TRAINCKPT_COMPILE_CACHE="tiers")
    (tmp_path / "trainckpt.toml").write_text('compile_cache = "tiers"')
    folders = [launch(argument)[0] for argument in "aab"]
    assert own == folders[0] == folders[1]
    assert len({shared, *folders}) == 3


def test_a_folder_that_the_user_has_named_is_left_alone(launch):
    assert launch(TORCHINDUCTOR_CACHE_DIR="/scratch/x") == ("/scratch/x", [])


def test_an_unusable_folder_is_named_and_the_command_runs(launch, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    folder, said = launch()
    assert folder is None
    assert len(said) == 1
    assert "compile caches are left where torch puts them" in said[0]
