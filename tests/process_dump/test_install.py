"""The command that installs CRIU; that it does: `make criu`."""

from __future__ import annotations

import shutil

import pytest

from trainckpt.process_dump import criu, install


def test_help_is_no_folder(tmp_path, monkeypatch, capsys):
    # It was one once, with all of CRIU in it.
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as left:
        install.main(["--help"])

    assert left.value.code == 0
    assert "folder" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_criu_that_was_moved_gets_the_paths_of_its_new_place_and_nothing_is_fetched(
    tmp_path, monkeypatch
):
    if not (criu.INSTALLED / install.PROGRAM).is_file():
        pytest.skip("`make criu` has installed none")
    moved = tmp_path / "moved"
    shutil.copytree(criu.INSTALLED, moved, symlinks=True, ignore=shutil.ignore_patterns("share"))
    loader = install._loader(moved)
    tool = [str(loader), "--library-path", str(loader.parent), str(moved / "usr/bin/patchelf")]
    install._run(*tool, "--set-interpreter", "/nowhere/ld.so", str(moved / install.PROGRAM))
    assert criu.version_of(moved / install.PROGRAM) is None
    monkeypatch.setenv("PATH", "")  # without apt-get and dpkg
    assert install.main([str(moved)]) == 0
    assert criu.version_of(moved / install.PROGRAM) is not None
