"""The example trains and resumes where a cluster is stingy: no root, no HOME, nothing writable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a mount namespace of its own; the first two lines hide and show again what COVERS names.
STINGY = """
set -e
mount --make-rprivate /
{covers}
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
mount -o remount,ro,bind /
exec setpriv --reuid=65534 --regid=65534 --clear-groups env -i PATH="$PATH" \\
    PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 sh -c "$1"
"""


def covers():
    """Shell lines: a small /tmp, homes that others may not enter, and in them what we run."""
    needed = {ROOT, Path(sys.base_prefix)}
    closed = {closest for path in needed if (closest := closed_folder(path))}
    hidden = ["/tmp", *sorted(closed - {"/tmp"})]
    shown = [str(path) for path in sorted(needed) if str(path).startswith(tuple(hidden))]
    lines = ["mount -t tmpfs tmpfs /mnt"]
    lines += [f"mkdir /mnt/{n}; mount --bind {path} /mnt/{n}" for n, path in enumerate(shown)]
    modes = {"/tmp": "size=64m,mode=1777"}
    lines += [f"mount -t tmpfs -o {modes.get(h, 'mode=755')} tmpfs {h}" for h in hidden]
    lines += [f"mkdir -p {p}; mount --bind /mnt/{n} {p}" for n, p in enumerate(shown)]
    return "\n".join(lines)


def closed_folder(path):
    """The outermost folder above `path` that others may not enter, or ""."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return str(folder)
    return ""


def can_unshare():
    """True if this user may make mount namespaces, and has what the script calls."""
    tools = all(shutil.which(tool) for tool in ("unshare", "mount", "setpriv"))
    if os.geteuid() != 0 or not tools:
        return False
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def example(steps, run):
    """The command that trains the example for so many steps."""
    return (
        f"{sys.executable} {ROOT}/examples/char_gpt.py --size small --steps {steps} "
        f"--accumulate 2 --workers 2 --save-every 1 --run {run}"
    )


@pytest.mark.skipif(not can_unshare(), reason="needs root, unshare, mount and setpriv")
def test_it_resumes_as_nobody_with_little_shm_a_read_only_root_and_no_home():
    script = (
        "set -e; mkdir /tmp/here; cd /tmp/here; test ! -w / && test ! -w /root; "
        'test -z "$HOME"; id -u; '
        f"df -k /dev/shm | tail -1; {example(2, 'run')}; {example(3, 'run')}; ls"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", STINGY.format(covers=covers()), "sh", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "65534"
    assert " 65536 " in done.stdout
    assert "step 2  loss" in done.stdout
    assert "step 3  loss" in done.stdout
    assert "resumed from s2~1." in done.stderr
    assert done.stdout.splitlines()[-1] == "run"
