"""The example trains and resumes where a cluster is stingy: no root, no HOME, nothing writable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a mount namespace of its own. $1: a home that others may not enter, where Python may lie.
STINGY = """
set -e
mount --make-rprivate /
if [ -n "$1" ]; then
    mount --bind "$2" /mnt
    mount -t tmpfs -o mode=755 tmpfs "$1" && mkdir -p "$2"
    mount --bind /mnt "$2"
fi
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o size=64m,mode=1777 tmpfs /tmp
mount --bind / / 2>/dev/null || true
mount -o remount,ro,bind /
shift 2
exec setpriv --reuid=65534 --regid=65534 --clear-groups env -i PATH="$PATH" \\
    PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 sh -c "$1"
"""


def closed_home():
    """The folder that keeps others from this interpreter, and the part of it to let them see."""
    prefix = Path(sys.base_prefix)
    for folder in reversed(prefix.parents):
        if not folder.stat().st_mode & 0o001:
            below = folder / prefix.relative_to(folder).parts[0]
            return str(folder), str(below)
    return "", ""


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
        'set -e; cd /tmp; test ! -w / && test ! -w /root; test -z "$HOME"; id -u; '
        f"df -k /dev/shm | tail -1; {example(2, '/tmp/run')}; {example(3, '/tmp/run')}; "
        "ls /tmp | grep -v torchinductor"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", STINGY, "sh", *closed_home(), script],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "65534"
    assert " 65536 " in done.stdout
    assert "step 2  loss" in done.stdout
    assert "step 3  loss" in done.stdout
    assert "resumed from s2~1." in done.stderr
    assert done.stdout.splitlines()[-1] == "run"
