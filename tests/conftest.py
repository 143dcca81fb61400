"""What holds for all tests: hypothesis never judges the speed of a busy machine, and a test leaves
the process as it found it, so that none depends on which ran before it."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import cloud_servers, s3_servers
from tests.campaign import launch

settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("any-machine")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# Variables of launchers and ours; libraries set others when they are first used.
VARIABLES = ("TRAINCKPT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_")
THREAD_LIMIT_S = 20.0
ALONE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("alone.py"))]


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Handlers, the wakeup descriptor, the environment, the folder, threads, a process group."""
    before = _process_state()
    yield
    if _process_state() != before or _threads():
        gc.collect()  # what ends with its owner; a second for each test would be too much
    after = _process_state()
    left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not left, f"the test leaves something behind: {left}"
    for thread in _threads():
        thread.join(THREAD_LIMIT_S)
        assert not thread.is_alive(), f"the test leaves the thread {thread.name} behind"


def _threads():
    return [each for each in threading.enumerate() if each.name.startswith("trainckpt-")]


def _process_state():
    """What other tests in this process would see."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    distributed = sys.modules.get("torch.distributed")
    return {
        "handlers": {number.name: signal.getsignal(number) for number in SIGNALS},
        "wakeup": wakeup,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
        "folder": Path.cwd(),
        "group": bool(distributed and distributed.is_initialized()),
    }


@pytest.fixture(scope="session")
def server():
    """The warm server, for all tests of this process: see `tests.warm`."""
    with launch.server() as one:
        yield one


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory):
    """An S3 server, for all tests of this process: each has a prefix of its own."""
    with s3_servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server():
    with s3_servers.moto() as server:
        s3_servers.make_bucket(server)
        yield server


@pytest.fixture(scope="session")
def azurite_server():
    """Azure's blobs, for all tests of this process."""
    if why := cloud_servers.why_no_azurite():
        pytest.skip(why)
    with cloud_servers.azurite() as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server():
    """Google's store, for all tests of this process."""
    if why := cloud_servers.why_no_gcs():
        pytest.skip(why)
    with cloud_servers.gcs_emulator() as server:
        yield server


@pytest.fixture
def at(monkeypatch):
    """Makes a server, or a proxy before it, the one that clients of this process find."""

    def go(server, port=None):
        for name, value in server.environment(port).items():
            monkeypatch.setenv(name, value)

    return go


# Read when torch is loaded, here and in children: threads of small models wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run that a test stops must not ask for the job or pod in which the tests themselves run.
for variable in [name for name in os.environ if name.startswith(("SLURM_", "KUBERNETES_"))]:
    del os.environ[variable]


@pytest.fixture
def open_path():
    """Yield a folder that every user may come to, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="trainckpt-open-") as folder:
        path = Path(folder).resolve()
        path.chmod(0o755)
        yield path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Workers of xdist send reports as UTF-8, and a test may print names that are none."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Workers have no process, port or mount in common, where that can be had: what one of them
    dumps would else come back to numbers and ports that another one's tests have got."""
    if subprocess.run([*ALONE, "true"], check=False).returncode == 0:
        for spec in specs:
            spec.python = shlex.join([*ALONE, sys.executable])


# What tests leave in shared memory, since they kill what would give it back, ends with them.
MEMORY = f"/dev/shm/trainckpt-tests-{os.getpid()}"
os.environ["TRAINCKPT_MEMORY"] = MEMORY
# Compile caches of launches: those of a run that a user has started here stay as they are.
CACHE = f"{tempfile.gettempdir()}/trainckpt-tests-{os.getpid()}"
os.environ["TRAINCKPT_CACHE"] = CACHE


def pytest_sessionstart():
    Path(MEMORY).mkdir(mode=0o700, exist_ok=True)


def pytest_collection_finish():
    """Have the server that tests fork their ranks from started by nobody else: one that a loader
    needs first is born with the job's signals blocked, and so is all that is forked from it."""
    if "tests.ranks.processes" in sys.modules:
        forkserver.ensure_running()


def pytest_sessionfinish():
    shutil.rmtree(MEMORY, ignore_errors=True)
    shutil.rmtree(CACHE, ignore_errors=True)
