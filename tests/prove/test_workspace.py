"""The folder of links in which each run of a proof works."""

from __future__ import annotations

import json

import pytest

from trainckpt.prove import proof
from trainckpt.prove.proof import Workspace
from trainckpt.run_directory.run_url import PROVE_VARIABLE, in_proof


@pytest.fixture
def made(tmp_path):
    """A workspace of `<tmp>/project`, which has a script, a folder of outputs, and data beside."""
    project = tmp_path / "project"
    (project / "out").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / "train.py").write_text("pass")
    (project / "out" / "last.ckpt").write_text("the user's")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("1")
    (project / "proof").mkdir()
    one = Workspace(project / "proof", project)
    assert one.make() == ""
    return one


def test_files_are_links_and_directories_are_real(made, tmp_path):
    assert (made.path / "train.py").readlink() == tmp_path / "project" / "train.py"
    assert (made.path / ".git").is_symlink()
    assert not (made.path / "out").is_symlink()
    assert not (made.path / "proof").exists()
    assert (made.path / ".." / "data" / "rows").read_text() == "1"


def test_what_is_created_replaced_or_removed_stays_inside(made, tmp_path):
    (made.path / "out" / "new.ckpt").write_text("new")
    (made.path / "temporary").write_text("the proof's")
    (made.path / "temporary").rename(made.path / "out" / "last.ckpt")
    (made.path / "train.py").unlink()
    project = tmp_path / "project"
    assert [path.name for path in (project / "out").iterdir()] == ["last.ckpt"]
    assert (project / "out" / "last.ckpt").read_text() == "the user's"
    assert (project / "train.py").exists()


def test_the_next_run_gets_a_fresh_one_at_the_same_path(made, tmp_path):
    before = made.path
    (before / "new").write_text("")
    made.move_to(tmp_path / "kept")
    assert made.make() == ""
    assert made.path == before
    assert not (before / "new").exists()
    assert list((tmp_path / "kept").rglob("new"))


def test_beyond_so_many_files_a_directory_is_a_link(tmp_path, monkeypatch):
    """A data set of a million files is not gone through."""
    project = tmp_path / "project"
    (project / "images").mkdir(parents=True)
    for number in range(5):
        (project / "images" / f"{number}.png").touch()
    monkeypatch.setattr(proof, "MOST_ENTRIES", 4)
    one = Workspace(tmp_path, project)
    assert one.make() == ""
    assert (one.path / "images").is_symlink()
    monkeypatch.setattr(proof, "MOST_ENTRIES", 0)
    one.move_to(tmp_path / "kept")
    assert "more than 0 files" in one.make()


def test_an_absolute_path_is_moved_into_the_run_of_the_proof(tmp_path, monkeypatch):
    """Where the script names its folder of outputs, and an integration sees it."""
    assert in_proof("/scratch/out") == "/scratch/out"
    monkeypatch.setenv(PROVE_VARIABLE, json.dumps({"work": str(tmp_path)}))
    assert in_proof("/scratch/out") == f"{tmp_path}/scratch/out"
    assert in_proof(f"{tmp_path}/scratch/out") == f"{tmp_path}/scratch/out"
    assert in_proof("s3://bucket/out") == "s3://bucket/out"
    monkeypatch.setenv(PROVE_VARIABLE, json.dumps({"dir": str(tmp_path)}))
    assert in_proof("/scratch/out") == "/scratch/out"
