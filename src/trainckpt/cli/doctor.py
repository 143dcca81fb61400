"""doctor: check this machine and a run directory for checkpoints, with a cure for each lack.

The checks cover the run directory or store, encryption, process dumps with GPU state, and the
slower tiers, both those that the options name and those that the newest attempt recorded.

Nothing is left behind: files are written in a folder of doctor's own, which is removed. A run
directory that does not exist yet is not made; its nearest parent is tried instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt import heartbeat, launch, machine_checks
from trainckpt.attempt.machine_checks import MachineCheck
from trainckpt.attempt.options import read_options
from trainckpt.cli import output, tier_status
from trainckpt.encryption.encrypted_file import bytes_per_s
from trainckpt.encryption.keys import INSTALL, must_be_there, parse_recipients, read_identities
from trainckpt.errors import ConfigurationError, TierUnavailable, TrainckptError
from trainckpt.process_dump import criu, gpu_state, self_test
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.gpu_state import NVLS
from trainckpt.run_directory import run_tiers, run_url
from trainckpt.run_directory.tier_config import open_slower, recorded
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.storage import fs_probe
from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import ObjectStoreTier
from trainckpt.storage.retry import CLOSED
from trainckpt.storage.worker_pool import answer_within

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from trainckpt.attempt.options import Options
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Place, Tier
    from trainckpt.storage.fs_probe import Capabilities


# ---- speed: write a small probe once and read it back
#
# What is written for that is removed again. A directory that does not exist yet is not made: its
# nearest parent is tried.


PROBE_BYTES = 64 << 20
STORE_PROBE_BYTES = 16 << 20


@dataclass(frozen=True)
class Speed:
    """Measured speed of one process.

    Attributes:
        num_bytes: Of the probe.
        write_s, read_s: How long it took to write it so that it stays, and to read it; 0: there was
            no room to try.
    """

    num_bytes: int
    write_s: float = 0.0
    read_s: float = 0.0

    @property
    def known(self) -> bool:
        """True if it was measured."""
        return self.write_s > 0

    def in_words(self) -> str:
        """Return the item in words."""
        if not self.known:
            return "no room to measure it"
        seconds = (self.write_s, max(self.read_s, 1e-9))
        write, read = (output.size(int(self.num_bytes / duration_s)) for duration_s in seconds)
        return f"writes {write}/s and reads {read}/s ({output.size(self.num_bytes)}, one process)"


def try_directory(tier: LocalTier) -> tuple[Path, tuple[Capabilities, Speed]]:
    """Return the tried folder, the abilities of its file system, and its speed.

    Raises:
        OSError: it cannot be used.
        TierUnavailable: it does not answer.
    """
    folder = answer_within(tier.url, lambda: _nearest(tier.root))
    scratch = folder / f".tmp-doctor-{secrets.token_hex(8)}"
    return folder, answer_within(tier.url, lambda: _try(scratch))


def try_store(tier: ObjectStoreTier) -> Speed:
    """Measure the speed of an object store.

    Raises:
        TrainckptError: it cannot be used.
    """
    key = f"probe/doctor-{secrets.token_hex(8)}"
    data = memoryview(bytearray(os.urandom(1 << 20) * (STORE_PROBE_BYTES >> 20)))
    try:
        start = time.perf_counter()
        tier.write_parts(key, len(data), [(0, data)])
        write_end = time.perf_counter()
        tier.read_into(key, 0, data)
        return Speed(len(data), write_end - start, time.perf_counter() - write_end)
    finally:
        with contextlib.suppress(TrainckptError):
            tier.remove(key)


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest existing parent; `OSError` if that is no directory."""
    while True:
        try:
            next(path.iterdir(), None)
        except FileNotFoundError:
            path = path.parent
        else:
            return path


def _try(scratch: Path) -> tuple[Capabilities, Speed]:
    scratch.mkdir(mode=0o700)
    try:
        capabilities = fs_probe.measure(scratch)
        if 0 <= capabilities.free_bytes < 2 * PROBE_BYTES:
            return capabilities, Speed(PROBE_BYTES)
        return capabilities, _measure(scratch / "probe")
    finally:
        with contextlib.suppress(OSError):
            (scratch / "probe").unlink(missing_ok=True)
            scratch.rmdir()


def _measure(path: Path) -> Speed:
    """Write the probe to stable storage, read it back, and return both times."""
    block = mmap.mmap(-1, 4 << 20)
    block[:] = os.urandom(1 << 20) * 4
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(PROBE_BYTES // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        write_end = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        while os.read(descriptor, len(block)):
            pass
        return Speed(PROBE_BYTES, write_end - start, time.perf_counter() - write_end)
    finally:
        os.close(descriptor)


# ---- the command


PLACE = "run's place"
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="also check this run directory")


def execute(arguments: argparse.Namespace) -> int:
    """Print every item; 1 if one that is needed fails."""
    tier = run_url.open_place(arguments.run) if arguments.run else None
    items = examine(output.size)
    if tier is not None:
        items += _place(tier)
        items += examine_tiers(tier)
    ok = all(item.ok for item in items if item.needed)
    if arguments.json:
        rows = [{**asdict(item), "cure": "" if item.ok else item.cure} for item in items]
        output.document({"items": rows, "ok": ok})
        return 0 if ok else FAILED
    output.table(("what", "", "found", "cure"), [_row(item) for item in items])
    missing = [item.name for item in items if item.needed and not item.ok]
    print(
        "all needed features are available" if ok else f"needed but missing: {', '.join(missing)}"
    )
    return 0 if ok else FAILED


def examine(size: Callable[[int], str]) -> list[MachineCheck]:
    """Check this machine, encryption on it, and process dumps."""
    dumps = [examine_dumps(), examine_gpus()]
    return [*machine_checks.examine(size), *examine_encryption(), *dumps]


def _row(item: MachineCheck) -> tuple[str, ...]:
    verdict = "ok" if item.ok else "FAILS" if item.needed else "lacks"
    return (item.name, verdict, item.value, "" if item.ok else item.cure)


def _place(tier: Place) -> list[MachineCheck]:
    """Return checks of the run directory and its contents; they remove every file they write."""
    if not isinstance(tier, LocalTier):
        items = examine_store(tier)
        return [*items, *_run(tier, -1)] if items[0].ok else items
    try:
        folder, measured = try_directory(tier)
    except (OSError, TierUnavailable) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        cure = error.hint if isinstance(error, TierUnavailable) else ""
        cure = cure or f"make {tier.url} a directory that this user can read and write"
        return [MachineCheck(PLACE, ok=False, value=f"{tier.url}: {reason}", cure=cure)]
    capabilities, speed = measured
    new = "" if folder == tier.root else f"; {tier.url} is not there yet"
    place_check = MachineCheck(PLACE, ok=True, value=f"{folder} can be read and written{new}")
    speeds = MachineCheck("speed", speed.known, speed.in_words(), "free space there", needed=False)
    return [place_check, *_abilities(capabilities), speeds, *_run(tier, capabilities.free_bytes)]


def _abilities(found: Capabilities) -> list[MachineCheck]:
    elsewhere = "name a run on another file system"
    create_words = {fs_probe.LINK: "by link", fs_probe.EXCLUSIVE: "by exclusive creation"}
    tail = "" if found.direct_tail else ", but the file's end cannot be cut"
    return [
        MachineCheck("file system", ok=True, value=found.file_system or "not known", needed=False),
        MachineCheck(
            "rename",
            found.rename,
            "replaces in one act" if found.rename else "does not replace",
            elsewhere,
        ),
        MachineCheck(
            "create only",
            bool(found.create_only),
            create_words.get(found.create_only, "not possible"),
            elsewhere,
        ),
        MachineCheck(
            "directory sync",
            found.folder_sync,
            "works" if found.folder_sync else "a power cut may lose the newest snapshots",
            elsewhere,
            needed=False,
        ),
        MachineCheck(
            "flock",
            found.lock,
            "works" if found.lock else "does not work",
            "nothing in this version needs it; NFS: mount with locks",
            needed=False,
        ),
        MachineCheck(
            "O_DIRECT",
            found.direct and found.direct_tail,
            f"works{tail}" if found.direct else "does not work",
            "nothing to do: writes go through the page cache",
            needed=False,
        ),
    ]


def _run(tier: Place, free_bytes: int) -> list[MachineCheck]:
    """Check the run in this place, if any, and the room for its next snapshots."""
    try:
        run = attempt_history.run_id(tier)
        candidates = run_tiers.read_candidates(tier) if run else ()
    except TrainckptError as error:
        return [MachineCheck("run", ok=False, value=error.message, cure=error.hint)]
    largest = max((c.manifest.num_bytes for c in candidates if c.manifest), default=0)
    room = free_bytes < 0 or free_bytes >= 2 * largest
    free = output.size(free_bytes) if free_bytes >= 0 else "not known"
    largest_text = f", the largest snapshot has {output.size(largest)}" if largest else ""
    items = [
        MachineCheck(
            "free space", room, f"{free}{largest_text}", "free space there, or lower keep_last"
        )
    ]
    if run is None:
        return [*items, MachineCheck("run", ok=True, value="none yet", needed=False)]
    items.append(MachineCheck("run", ok=True, value=run))
    # A newer attempt that began anew has left older snapshots behind; they are not damaged.
    committed = [
        c for c in candidates if c.reason not in (catalog.NOT_COMMITTED, catalog.ABANDONED)
    ]
    newest = next((c for c in candidates if c.usable), None)
    value = "none yet" if not committed else "none is usable"
    if newest is not None and newest.manifest is not None:
        value = f"{newest.name}, {output.when(newest.manifest.created)}"
    cure = f"trainckpt list {tier.url} says why each is refused"
    items.append(MachineCheck("newest snapshot", bool(newest) or not committed, value, cure))
    return [*items, _live(tier)]


def _live(tier: Place) -> MachineCheck:
    for number, record in sorted(attempt_history.read_attempts(tier).items(), reverse=True):
        age = None if record.outcome else heartbeat.age_s(tier, number)
        if age is not None and age < heartbeat.ALIVE_S:
            value = f"attempt {number} is alive, its heartbeat {age:.0f} s old"
            return MachineCheck("live attempt", ok=True, value=value, needed=False)
    return MachineCheck("live attempt", ok=True, value="none", needed=False)


ENCRYPTION = "encryption"


def examine_encryption() -> list[MachineCheck]:
    """Check encryption; a run needs it only if its options ask for it."""
    try:
        options = read_options({})
    except ConfigurationError:  # `trainckpt config` says which
        return [_package(needed=False)]
    is_configured = bool(options.encrypt_to or options.identity)
    checks = [_package(needed=is_configured)]
    if checks[0].ok:
        checks += _recipients(options) + _identity(options)
    return checks


def _package(*, needed: bool) -> MachineCheck:
    try:
        must_be_there()
    except ConfigurationError:
        problem = "the package cryptography is not installed"
        return MachineCheck(ENCRYPTION, ok=False, value=problem, cure=INSTALL, needed=needed)
    version = metadata.version("cryptography")
    value = f"AES-256-GCM at {output.size(bytes_per_s())}/s a core, cryptography {version}"
    return MachineCheck(ENCRYPTION, ok=True, value=value, needed=needed)


def _recipients(options: Options) -> list[MachineCheck]:
    if not options.encrypt_to:
        return []
    try:
        recipients = parse_recipients(options.encrypt_to)
    except ConfigurationError as error:
        return [MachineCheck("recipients", ok=False, value=error.message, cure=error.hint)]
    return [MachineCheck("recipients", ok=True, value=", ".join(recipients))]


def _identity(options: Options) -> list[MachineCheck]:
    """Check the identity file: its permissions, and its match with a recipient."""
    if options.identity is None:
        return []
    name, path = "identity", Path(options.identity)
    try:
        identities = read_identities(path)
        mode = path.stat().st_mode & 0o777
    except ConfigurationError as error:
        return [MachineCheck(name, ok=False, value=error.message, cure=error.hint)]
    except OSError as error:
        return [
            MachineCheck(
                name, ok=False, value=f"{path}: {error.strerror}", cure="name another file"
            )
        ]
    recipients_text = ", ".join(identity.recipient for identity in identities)
    value = f"{path} reads what is encrypted to {recipients_text}"
    if mode & 0o077:
        value = f"{path} can be read by others (mode {mode:04o})"
        return [MachineCheck(name, ok=False, value=value, cure=f"chmod 600 {path}")]
    return [MachineCheck(name, ok=True, value=value)]


DUMPS, GPUS = "process dumps", "dumps of GPU state"
NVIDIA = Path("/dev/nvidiactl")


def examine_dumps() -> MachineCheck:
    """One item; a run does without."""
    ability = criu.examine()
    if ability.why_not or ability.program is None:
        return MachineCheck(DUMPS, ok=False, value=ability.why_not, cure=ability.cure, needed=False)
    trial = self_test.run(ability.program)
    if trial.why_not:
        return MachineCheck(DUMPS, ok=False, value=trial.why_not, cure=criu.INSTALL, needed=False)
    duration_text = (
        f"two processes were dumped in {trial.dump_s:.1f} s, restored in {trial.restore_s:.1f} s"
    )
    return MachineCheck(
        DUMPS, ok=True, value=f"CRIU {ability.version}: {duration_text}", needed=False
    )


def examine_gpus() -> MachineCheck:
    """One item: whether what processes have on GPUs can be set aside. Nothing of it is tried."""
    if not NVIDIA.exists():
        return MachineCheck(GPUS, ok=True, value="no GPU of NVIDIA's here", needed=False)
    with CudaDriver() as driver:
        return of_gpus(driver.machine())


def of_gpus(
    machine: gpu_state.Machine, environment: Mapping[str, str] = os.environ
) -> MachineCheck:
    """Return the item for a machine's GPUs. Pure."""
    reason, cure = gpu_state.why_not_here(machine)
    if reason:
        return MachineCheck(GPUS, ok=False, value=reason, cure=cure, needed=False)
    value = f"driver {machine.driver}, GPUs: {len(machine.devices)}"
    if not machine.persistent:
        value += "; persistence mode is off, so the first call takes longer (nvidia-smi -pm 1)"
    if len(machine.devices) > 1 and environment.get(NVLS) != "0":
        value += f"; ranks over NCCL are to be launched with {NVLS}=0"
    return MachineCheck(GPUS, ok=True, value=value, needed=False)


def examine_store(tier: ObjectStoreTier) -> list[MachineCheck]:
    """Return checks of an object store. The first one says if it can be used at all."""
    try:
        speed = try_store(tier)
        creates_only = tier.creates_only()
    except TrainckptError as error:
        return [
            MachineCheck(PLACE, ok=False, value=error.message, cure=error.hint or "see docs"),
            health(tier),
        ]
    create_words = (
        "refused where the name is there" if creates_only else "not refused: names are claimed"
    )
    return [
        MachineCheck(PLACE, ok=True, value=f"{tier.url} can be read and written"),
        MachineCheck("create only", ok=True, value=create_words, needed=False),
        MachineCheck("speed", ok=True, value=speed.in_words(), needed=False),
        health(tier),
    ]


def health(tier: ObjectStoreTier, name: str = "calls to the store") -> MachineCheck:
    """Return a check of the calls made by this command to a store."""
    status = tier.health()
    value = status.state if not status.last_error else f"{status.state}; met {status.last_error}"
    return MachineCheck(
        name, status.state == CLOSED, value, "see whether it can be reached", needed=False
    )


NOT_STORED, NAME_IT = "its URL holds a secret that was not stored", "name it: TRAINCKPT_TIERS"
CURE = "see whether it can be reached, and written, from here"


def examine_tiers(place: Place) -> list[MachineCheck]:
    """Return checks of each tier: its speed, its calls if it is a store, and the run's trouble with
    it.
    """
    try:
        records = attempt_history.read_attempts(place)
    except (TrainckptError, OSError):
        records = {}  # the place's own items say so
    try:
        slower = open_slower(read_options({}).tiers, None, place).tiers
        recorded_tiers, unknown = recorded(records, place, slower)
    except TrainckptError as error:
        return [MachineCheck("tiers", ok=False, value=error.message, cure=error.hint, needed=False)]
    items = [
        MachineCheck(f"tier {name}", ok=False, value=NOT_STORED, cure=NAME_IT, needed=False)
        for name in unknown
    ]
    for tier in (*slower, *recorded_tiers):
        items += _tier(tier, records)
    return items


def _tier(tier: Tier, records: Mapping[int, AttemptRecord]) -> list[MachineCheck]:
    name, url = f"tier {tier.name}", launch.redact_text(tier.url)
    try:
        if isinstance(tier, ObjectStoreTier):
            speed = try_store(tier)
        else:
            assert isinstance(tier, LocalTier)
            _, (_, speed) = try_directory(tier)
        items = [MachineCheck(name, ok=True, value=f"{url}: {speed.in_words()}", needed=False)]
    except (TrainckptError, OSError) as error:
        error_text = (
            getattr(error, "message", None) or f"{url}: {getattr(error, 'strerror', error)}"
        )
        cure = getattr(error, "hint", "") or CURE
        items = [
            MachineCheck(
                name, ok=False, value=launch.redact_text(error_text), cure=cure, needed=False
            )
        ]
    if isinstance(tier, ObjectStoreTier):
        items.append(health(tier, f"calls to {tier.name}"))
    trouble = tier_status.trouble_of(records, tier.name)
    if trouble is not None:
        trouble_text = tier_status.in_words(trouble)
        items.append(
            MachineCheck(
                f"{tier.name} in the run", ok=False, value=trouble_text, cure=CURE, needed=False
            )
        )
    return items
