"""Prefetch: `python -m trainckpt.launcher.prefetch RUN [SNAPSHOT]`, beside a launch.

While the ranks import torch and connect, this process reads the snapshot that they will most likely
resume from into the host's memory. The ranks choose for themselves, wait for reads in flight, and
verify every digest. After a wrong or unfinished guess they read from the tier.

Until the ranks wait for it, this process yields cores and disk to the launch, whose small reads of
modules would queue behind large ones.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE
from trainckpt.errors import TrainckptError
from trainckpt.format.names import RUN_RECORD, SNAPSHOTS
from trainckpt.resume import candidate_order
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.snapshot.fetch import fetch, held_bytes, is_shared
from trainckpt.storage import libc, replica_slots
from trainckpt.storage.host_resources import has_room, training_bytes
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.manifest import Manifest
    from trainckpt.storage.base import RunTier

_END_WITHIN_S = 5.0
_LOOK_AGAIN_S = 0.02
NICE = 10  # a ninth of what the launch gets, where both want a core


def main(arguments: list[str]) -> int:
    """Fetch; return 0 whatever came of it: no rank depends on it."""
    run, *wanted_snapshot = arguments
    with contextlib.suppress(TrainckptError, OSError):
        tier = run_url.open_tier_at(run)
        # A command without a Checkpointer never gives memory back, and has no snapshot to bring.
        has_some = tier.size(RUN_RECORD) and tier.list(SNAPSHOTS)
        memory = SharedMemoryDir.of(tier.url) if has_some else None
        if memory is not None:
            with memory.fetching():
                bring(tier, memory, *wanted_snapshot)
    return 0


def _give_way() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    with contextlib.suppress(OSError):  # sessions share the cores alike, whatever is in each
        Path("/proc/self/autogroup").write_text(f"{NICE}\n", encoding="ascii")
    libc.set_idle_io_priority()


@contextlib.contextmanager
def _awaited(memory: SharedMemoryDir) -> Iterator[threading.Event]:
    """Yield an event that is set, at full priority from then on, once the ranks wait for this."""
    awaited, finished = threading.Event(), threading.Event()

    def watch() -> None:
        while not finished.wait(_LOOK_AGAIN_S):
            if memory.is_awaited():
                libc.reset_io_priority()
                awaited.set()
                return

    watcher = threading.Thread(target=watch, name="trainckpt-awaited", daemon=True)
    watcher.start()
    try:
        yield awaited
    finally:
        finished.set()
        watcher.join()


def bring(tier: RunTier, memory: SharedMemoryDir, wanted: str | None = None) -> list[int]:
    """Fetch the snapshot that a resume would choose now; return the ranks whose files came."""
    run = attempt_history.run_id(tier)
    records = attempt_history.read_attempts(tier) if run is not None else {}
    manifest = _likely(tier, run, records, wanted) if run is not None else None
    if manifest is None or manifest.encryption is not None:
        return []  # no key is asked for here
    if any(replica_slots.MANIFEST in replica_slots.files(memory, f) for f in memory.folders()):
        return []  # what is in memory alone must not be overwritten before the ranks have seen it
    num_bytes = sum(file.num_bytes for file in manifest.files)
    newest = records[max(records)].facts if records else {}
    hosts = len(set(newest.get("hosts", ()))) or 1  # the next attempt has as many
    num_local_files = -(-len(manifest.files) // hosts)
    if not has_room(
        memory, num_bytes, training_bytes(held_bytes(manifest) // hosts, num_local_files)
    ):
        return []  # the ranks have taken nothing yet
    with _awaited(memory) if isinstance(tier, LocalTier) else contextlib.nullcontext() as awaited:
        return fetch(tier, memory, manifest, range(len(manifest.files)), awaited=awaited)


def _likely(
    tier: RunTier, run: str, before: Mapping[int, AttemptRecord], wanted: str | None
) -> Manifest | None:
    if wanted is not None:
        return catalog.find(catalog.read_catalog(tier, run, before), wanted).manifest
    candidates = candidate_order.order(tier, run, before).candidates
    if not candidates:
        return None
    manifest = catalog.load_manifest(tier, run, candidates[0])
    hosts = {host for r in before.values() for host in r.facts.get("hosts", ())}
    if len(hosts) > 1 and not isinstance(tier, LocalTier):
        return None  # the ranks of all hosts read a store once between them
    return manifest if len(hosts) == 1 or is_shared(manifest) else None  # else: whose is which?


@contextlib.contextmanager
def beside(run: str | None, variables: Mapping[str, str], wanted: str | None) -> Iterator[None]:
    """Prefetch while a launch runs; `run` is its likely run directory, or None."""
    process = None
    if run is not None:
        # It is no part of the launch: that it imports us says nothing of the command.
        child_variables = {
            name: value for name, value in variables.items() if name != SUPERVISOR_VARIABLE
        }
        command = [sys.executable, "-m", __name__, run, *([wanted] if wanted else [])]
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                command,
                env=child_variables,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_WITHIN_S)


if __name__ == "__main__":
    _give_way()
    sys.exit(main(sys.argv[1:]))
