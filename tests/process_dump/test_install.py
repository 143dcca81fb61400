"""The command that installs CRIU; that it does: `make criu`."""

from __future__ import annotations

import pytest

from trainckpt.process_dump import install


def test_help_is_no_folder(tmp_path, monkeypatch, capsys):
    # It was one once, with all of CRIU in it.
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as left:
        install.main(["--help"])

    assert left.value.code == 0
    assert "folder" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
