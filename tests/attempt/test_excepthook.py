"""An error of ours that nobody catches ends the process with its code; others with Python's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import warm
from trainckpt.attempt.log import exit_code_of

SCRIPT = """
import atexit, logging, sys
from trainckpt import Checkpointer
from trainckpt.errors import TierUnavailable
from trainckpt.attempt.log import prepare
prepare()
atexit.register(lambda: print("the script's own atexit"))
logging.getLogger("x").addHandler(logging.StreamHandler())
{last}
"""


CODES = [None, 0, 3, 75, 255, 256, -1, -2, -(2**40) - 2, 2**70, True, False, "told", 2.5]
CODES += [()] if sys.version_info < (3, 13) else []  # since then `sys.exit` takes it for None


@pytest.mark.parametrize("code", CODES)
def test_what_a_script_exits_with_is_known_as_the_system_tells_it(code):
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.exit({code!r})"],
        check=False,
        stderr=subprocess.DEVNULL,
    )
    assert exit_code_of(SystemExit(code)) == done.returncode


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("Checkpointer('run', resume='required').resume()", 66),
        ("raise TierUnavailable('x')", 69),
        ("raise ValueError('x')", 1),
        ("sys.exit(7)", 7),
        ("try:\n    raise TierUnavailable('x')\nexcept TierUnavailable:\n    pass", 0),
    ],
)
def test_the_code_of_the_process_is_the_code_of_the_error(server, tmp_path, last, code):
    done = warm.run(server, ["-c", SCRIPT.format(last=last)], cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout == "the script's own atexit\n"
    assert ("Traceback" in done.stderr) == (code not in (0, 7))
    assert list(tmp_path.iterdir()) == []
