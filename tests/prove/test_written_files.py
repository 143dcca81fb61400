"""What a process writes outside the proof's folder, as Python's audit events show it."""

from __future__ import annotations

import subprocess
import sys

from trainckpt.recording.script_files import read_written

SCRIPT = """
import os, pathlib, sys
from trainckpt.recording.script_files import record_writes
records, own, outside = map(pathlib.Path, sys.argv[1:])
record_writes(records, own)
(own / "inside").write_text("")
open(outside / "read").read()
open(outside / "log", "a").close()
(outside / "replaced.part").write_text("")
(outside / "replaced.part").rename(outside / "replaced")
(outside / "folder").mkdir()
(outside / "folder").mkdir(exist_ok=True)
(outside / "there").mkdir(exist_ok=True)
os.close(os.open(outside / "folder" / "file", os.O_CREAT | os.O_WRONLY))
os.chdir(outside)
open("relative", "w").close()
"""


def test_files_and_folders_that_are_written_outside_are_listed(tmp_path):
    """Not what is read, or inside the proof's own folder; a new folder is one item."""
    records, own, outside = (tmp_path / name for name in ("records", "own", "outside"))
    for folder in (records, own, outside, outside / "there"):
        folder.mkdir()
    (outside / "read").touch()
    # a home in which nothing is, so that no cache is; nor is the folder a temporary one
    variables = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, *map(str, (records, own, outside))]
    subprocess.run(command, env=variables, check=True)
    names = ["folder", "log", "relative", "replaced"]
    assert read_written(records) == [str(outside / name) for name in names]
