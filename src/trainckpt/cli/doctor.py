"""doctor: check this machine and a run directory for checkpoints, with a cure for each lack.

The checks cover the machine, encryption, process dumps with GPU state, the run directory or store,
and the slower tiers, both those that the options name and those that the newest attempt recorded.

Nothing is left behind: files are written in a folder of doctor's own, which is removed. A run
directory that does not exist yet is not made; its nearest parent is tried instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.options import read_options
from trainckpt.cli import output, tier_status
from trainckpt.encryption.encrypted_file import bytes_per_s
from trainckpt.encryption.keys import INSTALL, must_be_there, parse_recipients, read_identities
from trainckpt.errors import ConfigurationError, TierUnavailable, TrainckptError
from trainckpt.preemption.signal_source import SignalSource
from trainckpt.process_dump import criu, gpu_state, self_test
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.gpu_state import NVLS
from trainckpt.run_directory import run_tiers, run_url
from trainckpt.run_directory.tier_config import open_slower, recorded
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.storage import fs_probe, host_resources
from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import ObjectStoreTier
from trainckpt.storage.redact import redact_text
from trainckpt.storage.retry import CLOSED
from trainckpt.storage.worker_pool import answer_within

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import RunTier, Tier
    from trainckpt.storage.fs_probe import Capabilities

FAILED = 1


@dataclass(frozen=True)
class DoctorCheck:
    """One checked fact.

    Attributes:
        name: Of the fact.
        ok: The fact is as it should be.
        value: The finding, for people.
        cure: Advice if it is not ok.
        needed: A run cannot do without.
    """

    name: str
    ok: bool
    value: str
    cure: str = ""
    needed: bool = False


def _fine(name: str, value: str, *, needed: bool = False) -> DoctorCheck:
    return DoctorCheck(name, ok=True, value=value, needed=needed)


def _lacks(name: str, value: str, cure: str = "", *, needed: bool = False) -> DoctorCheck:
    return DoctorCheck(name, ok=False, value=value, cure=cure, needed=needed)


def _refused(name: str, error: TrainckptError, *, needed: bool = True) -> DoctorCheck:
    return _lacks(name, error.message, error.hint, needed=needed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="also check this run directory")


def execute(arguments: argparse.Namespace) -> int:
    """Print every check; 1 if one that is needed fails."""
    run_tier = run_url.open_run_tier(arguments.run) if arguments.run else None
    checks = list(check_host())
    if run_tier is not None:
        checks += [*check_place(run_tier), *check_tiers(run_tier)]
    missing = [check.name for check in checks if check.needed and not check.ok]
    if arguments.json:
        rows = [{**asdict(check), "cure": "" if check.ok else check.cure} for check in checks]
        output.document({"items": rows, "ok": not missing})
    else:
        output.table(("what", "", "found", "cure"), [_row(check) for check in checks])
        missing_text = f"needed but missing: {', '.join(missing)}"
        print(missing_text if missing else "all needed features are available")
    return FAILED if missing else 0


def _row(check: DoctorCheck) -> tuple[str, ...]:
    if check.ok:
        return (check.name, "ok", check.value, "")
    return (check.name, "FAILS" if check.needed else "lacks", check.value, check.cure)


# ---- this host: the machine, in the order in which the facts depend on each other


OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
OLDEST_TORCH = (2, 6)
OTHER_TORCH = "install a torch that was built with it"
SHM = Path("/dev/shm")  # noqa: S108 - only looked at
LEAST_SHM_BYTES = 512_000_000  # containers start with 64 MB
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
WAIT_S = 5.0
DUMPS, GPUS = "process dumps", "dumps of GPU state"
NVIDIA = Path("/dev/nvidiactl")


def check_host() -> Iterator[DoctorCheck]:
    """Yield checks of this machine, encryption on it, and process dumps."""
    yield from check_machine()
    yield from check_encryption()
    yield check_dumps()
    yield check_gpu_dumps()


def check_machine() -> Iterator[DoctorCheck]:
    """Yield checks of Python, torch, signals, memory and cores."""
    version = sys.version_info[:2]
    yield DoctorCheck(
        "python",
        OLDEST_PYTHON <= version <= NEWEST_PYTHON,
        ".".join(map(str, sys.version_info[:3])),
        "use Python 3.11 to 3.14; others were not tested",
        needed=version < OLDEST_PYTHON,
    )
    torch_check = _check_torch()
    yield torch_check
    if torch_check.ok:
        yield from _check_distributed()
        yield _check_devices()
    yield check_signals()
    yield _check_memory()
    yield _check_shared_memory()
    yield _check_cores()


def _check_torch() -> DoctorCheck:
    cure = "pip install -U 'torch>=2.6'"
    try:
        version = metadata.version("torch")
        import torch  # noqa: F401 - that it loads is the question
    except (ImportError, OSError) as error:
        return _lacks("torch", str(error), cure, needed=True)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    return DoctorCheck("torch", numbers >= OLDEST_TORCH, version, cure, needed=True)


def _check_distributed() -> Iterator[DoctorCheck]:
    """Make a real group of one, which resolves the host's name, and a real store."""
    dist: Any = import_module("torch.distributed")  # its classes lack annotations
    name, store_name, wait = "torch.distributed", "store of the ranks", timedelta(seconds=WAIT_S)
    if dist.is_available():
        yield _check_gloo(dist, name, wait)
        yield _check_store(dist, store_name, wait)
    else:
        yield _lacks(name, "not in this torch", OTHER_TORCH)
        yield _lacks(store_name, "not in this torch", OTHER_TORCH)
    clones = hasattr(getattr(dist, "TCPStore", None), "clone")
    value = f"each thread {'clones' if clones else 'opens'} a connection"
    cure = "torch 2.8 or later, where the ranks' store admits no second client"
    yield DoctorCheck("TCPStore.clone", clones, value, cure)


def _check_gloo(dist: Any, name: str, wait: timedelta) -> DoctorCheck:
    if not dist.is_gloo_available():
        return _lacks(name, "gloo is not in this torch", OTHER_TORCH)
    try:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, wait)
    except RuntimeError as error:
        cure = "name the network interface: GLOO_SOCKET_IFNAME=lo on one host"
        return _lacks(name, f"gloo: {_first_line(error)}", cure)
    return _fine(name, "gloo")


def _check_store(dist: Any, name: str, wait: timedelta) -> DoctorCheck:
    cure = "let processes of this host connect to each other over 127.0.0.1"
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=wait)
        store.set("question", "answer")
        ok = other.get("question") == b"answer"
    except RuntimeError as error:
        return _lacks(name, _first_line(error), cure)
    return DoctorCheck(name, ok, "answers over 127.0.0.1", cure)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0][:120]


def _check_devices() -> DoctorCheck:
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {torch.cuda.get_device_name(at) for at in range(number)}
    return _fine("GPUs", f"{number} {', '.join(sorted(names))}".strip())


def check_signals() -> DoctorCheck:
    """Send this process a real signal, and receive it the way a run does."""
    number = signal.SIGTERM
    source = SignalSource(signals=(number,))
    source.start()
    try:
        if not source.available:
            cure = "make the Checkpointer on the main thread; notice files are heard anywhere"
            return _lacks("signals", source.why, cure)
        signal.raise_signal(number)
        until = time.monotonic() + WAIT_S
        while not (heard := source.poll()) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        source.stop()
    value = f"{heard[0].reason} is heard" if heard else f"{number.name} is not heard"
    cure = "unblock signals before the script is started"
    return DoctorCheck("signals", bool(heard), value, cure, needed=True)


def _check_memory() -> DoctorCheck:
    limit = host_resources.limit_bytes()
    if limit is None:
        return _fine("memory", "not known")
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    by_cgroup = f"{output.size(limit)}, by the cgroup, of " if limit < host else ""
    return _fine("memory", f"{by_cgroup}{output.size(host)}")


def _check_shared_memory() -> DoctorCheck:
    if not SHM.is_dir():
        cure = f"mount a tmpfs at {SHM}; data loader workers need one"
        return _lacks("shared memory", f"no {SHM}", cure)
    usage = shutil.disk_usage(SHM)
    return DoctorCheck(
        "shared memory",
        usage.free >= LEAST_SHM_BYTES,
        f"{output.size(usage.free)} free of {output.size(usage.total)} in {SHM}",
        "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir of medium Memory there",
    )


def _check_cores() -> DoctorCheck:
    host_cores = os.cpu_count() or 1
    usable_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host_cores
    value = f"{usable_cores} of {host_cores}"
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text(encoding="utf-8").split()
        if quota.isdecimal():
            value += f", {int(quota) / int(period):g} by the cgroup's quota"
    return _fine("cores", value)


def check_encryption() -> Iterator[DoctorCheck]:
    """Yield checks of encryption; a run needs it only if its options ask for it."""
    try:
        options = read_options({})
    except ConfigurationError:  # `trainckpt config` says which
        options = None
    needed = options is not None and bool(options.encrypt_to or options.identity)
    try:
        must_be_there()
    except ConfigurationError:
        problem = "the package cryptography is not installed"
        yield _lacks("encryption", problem, INSTALL, needed=needed)
        return
    version = metadata.version("cryptography")
    speed = f"AES-256-GCM at {output.size(bytes_per_s())}/s a core, cryptography {version}"
    yield _fine("encryption", speed, needed=needed)
    if options is not None and options.encrypt_to:
        try:
            recipients = ", ".join(parse_recipients(options.encrypt_to))
            yield _fine("recipients", recipients, needed=True)
        except ConfigurationError as error:
            yield _refused("recipients", error)
    if options is not None and options.identity is not None:
        yield _check_identity(Path(options.identity))


def _check_identity(path: Path) -> DoctorCheck:
    """Check the identity file: its permissions, and its match with a recipient."""
    try:
        identities = read_identities(path)
        mode = path.stat().st_mode & 0o777
    except ConfigurationError as error:
        return _refused("identity", error)
    except OSError as error:
        value = f"{path}: {error.strerror}"
        return _lacks("identity", value, "name another file", needed=True)
    if mode & 0o077:
        value = f"{path} can be read by others (mode {mode:04o})"
        return _lacks("identity", value, f"chmod 600 {path}", needed=True)
    recipients = ", ".join(identity.recipient for identity in identities)
    return _fine("identity", f"{path} reads what is encrypted to {recipients}", needed=True)


def check_dumps() -> DoctorCheck:
    """Dump two small processes and restore them; a run does without."""
    ability = criu.examine()
    if ability.why_not or ability.program is None:
        return _lacks(DUMPS, ability.why_not, ability.cure)
    trial = self_test.run(ability.program)
    if trial.why_not:
        return _lacks(DUMPS, trial.why_not, criu.INSTALL)
    dump_s, restore_s = f"{trial.dump_s:.1f} s", f"{trial.restore_s:.1f} s"
    value = (
        f"CRIU {ability.version}: two processes were dumped in {dump_s}, restored in {restore_s}"
    )
    return _fine(DUMPS, value)


def check_gpu_dumps() -> DoctorCheck:
    """Check that the state of processes on GPUs can be set aside. Nothing of it is tried."""
    if not NVIDIA.exists():
        return _fine(GPUS, "no GPU of NVIDIA's here")
    with CudaDriver() as driver:
        return of_gpus(driver.machine())


def of_gpus(machine: gpu_state.Machine, environment: Mapping[str, str] = os.environ) -> DoctorCheck:
    """Return the check of a machine's GPUs. Pure."""
    reason, cure = gpu_state.why_not_here(machine)
    if reason:
        return _lacks(GPUS, reason, cure)
    value = f"driver {machine.driver}, GPUs: {len(machine.devices)}"
    if not machine.persistent:
        value += "; persistence mode is off, so the first call takes longer (nvidia-smi -pm 1)"
    if len(machine.devices) > 1 and environment.get(NVLS) != "0":
        value += f"; ranks over NCCL are to be launched with {NVLS}=0"
    return _fine(GPUS, value)


# ---- the run directory or store, and the run in it; every file written for that is removed


PLACE = "run's place"


def check_place(tier: RunTier) -> Iterator[DoctorCheck]:
    """Yield checks of the run directory or store, and of its contents."""
    if not isinstance(tier, LocalTier):
        checks = _check_store_place(tier)
        yield from checks
        if checks[0].ok:
            yield from _check_run(tier, -1)
        return
    try:
        folder, capabilities, speed = try_directory(tier)
    except (OSError, TierUnavailable) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        cure = error.hint if isinstance(error, TierUnavailable) else ""
        cure = cure or f"make {tier.url} a directory that this user can read and write"
        yield _lacks(PLACE, f"{tier.url}: {reason}", cure, needed=True)
        return
    new = "" if folder == tier.root else f"; {tier.url} is not there yet"
    yield _fine(PLACE, f"{folder} can be read and written{new}", needed=True)
    yield from _check_abilities(capabilities)
    yield DoctorCheck("speed", bool(speed), speed or "no room to measure it", "free space there")
    yield from _check_run(tier, capabilities.free_bytes)


def _check_abilities(can: Capabilities) -> Iterator[DoctorCheck]:
    elsewhere = "name a run on another file system"
    yield _fine("file system", can.file_system or "not known")
    rename = "replaces in one act" if can.rename else "does not replace"
    yield DoctorCheck("rename", can.rename, rename, elsewhere, needed=True)
    ways = {fs_probe.LINK: "by link", fs_probe.EXCLUSIVE: "by exclusive creation"}
    create = ways.get(can.create_only, "not possible")
    yield DoctorCheck("create only", bool(can.create_only), create, elsewhere, needed=True)
    sync = "works" if can.folder_sync else "a power cut may lose the newest snapshots"
    yield DoctorCheck("directory sync", can.folder_sync, sync, elsewhere)
    lock_cure = "nothing in this version needs it; NFS: mount with locks"
    yield DoctorCheck("flock", can.lock, "works" if can.lock else "does not work", lock_cure)
    tail = "" if can.direct_tail else ", but the file's end cannot be cut"
    direct = f"works{tail}" if can.direct else "does not work"
    direct_cure = "nothing to do: writes go through the page cache"
    yield DoctorCheck("O_DIRECT", can.direct and can.direct_tail, direct, direct_cure)


def _check_store_place(tier: ObjectStoreTier) -> list[DoctorCheck]:
    """Return checks of an object store. The first one says if it can be used at all."""
    try:
        speed, creates_only = try_store(tier), tier.creates_only()
    except TrainckptError as error:
        unusable = _lacks(PLACE, error.message, error.hint or "see docs", needed=True)
        return [unusable, _check_calls(tier)]
    create = "refused where the name is there" if creates_only else "not refused: names are claimed"
    return [
        _fine(PLACE, f"{tier.url} can be read and written", needed=True),
        _fine("create only", create),
        _fine("speed", speed),
        _check_calls(tier),
    ]


def _check_calls(tier: ObjectStoreTier, name: str = "calls to the store") -> DoctorCheck:
    status = tier.health()
    value = status.state if not status.last_error else f"{status.state}; met {status.last_error}"
    return DoctorCheck(name, status.state == CLOSED, value, "see whether it can be reached")


def _check_run(tier: RunTier, free_bytes: int) -> Iterator[DoctorCheck]:
    """Check the run in this place, if any, and the room for its next snapshots."""
    try:
        run = attempt_history.run_id(tier)
        candidates = run_tiers.read_candidates(tier) if run else ()
    except TrainckptError as error:
        yield _refused("run", error)
        return
    largest = max((c.manifest.num_bytes for c in candidates if c.manifest), default=0)
    has_room = free_bytes < 0 or free_bytes >= 2 * largest
    free = output.size(free_bytes) if free_bytes >= 0 else "not known"
    largest_text = f", the largest snapshot has {output.size(largest)}" if largest else ""
    cure = "free space there, or lower keep_last"
    yield DoctorCheck("free space", has_room, f"{free}{largest_text}", cure, needed=True)
    yield _fine("run", run or "none yet", needed=run is not None)
    if run is None:
        return
    # A newer attempt that began anew has left older snapshots behind; they are not damaged.
    uncommitted = (catalog.NOT_COMMITTED, catalog.ABANDONED)
    committed = [c for c in candidates if c.reason not in uncommitted]
    newest = next((c for c in candidates if c.usable), None)
    value = "none yet" if not committed else "none is usable"
    if newest is not None and newest.manifest is not None:
        value = f"{newest.name}, {output.when(newest.manifest.created)}"
    cure = f"trainckpt list {tier.url} says why each is refused"
    yield DoctorCheck("newest snapshot", bool(newest) or not committed, value, cure, needed=True)
    yield _fine("live attempt", _live_attempt(tier))


def _live_attempt(tier: RunTier) -> str:
    for number, record in sorted(attempt_history.read_attempts(tier).items(), reverse=True):
        age = None if record.outcome else heartbeat.age_s(tier, number)
        if age is not None and age < heartbeat.ALIVE_S:
            return f"attempt {number} is alive, its heartbeat {age:.0f} s old"
    return "none"


# ---- slower tiers


TIER_CURE = "see whether it can be reached, and written, from here"


def check_tiers(run_tier: RunTier) -> Iterator[DoctorCheck]:
    """Yield each tier's speed, its calls if it is a store, and the run's trouble with it."""
    try:
        records = attempt_history.read_attempts(run_tier)
    except (TrainckptError, OSError):
        records = {}  # the place's own checks say so
    try:
        slower = open_slower(read_options({}).tiers, None, run_tier).tiers
        recorded_tiers, unknown = recorded(records, run_tier, slower)
    except TrainckptError as error:
        yield _refused("tiers", error, needed=False)
        return
    for name in unknown:
        value = "its URL holds a secret that was not stored"
        yield _lacks(f"tier {name}", value, "name it: TRAINCKPT_TIERS")
    for tier in (*slower, *recorded_tiers):
        yield from _check_tier(tier, records)


def _check_tier(tier: Tier, records: Mapping[int, AttemptRecord]) -> Iterator[DoctorCheck]:
    name, url = f"tier {tier.name}", redact_text(tier.url)
    try:
        if isinstance(tier, ObjectStoreTier):
            speed = try_store(tier)
        else:
            assert isinstance(tier, LocalTier)
            speed = try_directory(tier)[2] or "no room to measure it"
        yield _fine(name, f"{url}: {speed}")
    except TrainckptError as error:
        yield _lacks(name, redact_text(error.message), error.hint or TIER_CURE)
    except OSError as error:
        yield _lacks(name, f"{url}: {error.strerror}", TIER_CURE)
    if isinstance(tier, ObjectStoreTier):
        yield _check_calls(tier, f"calls to {tier.name}")
    if trouble := tier_status.trouble_of(records, tier.name):
        yield _lacks(f"{tier.name} in the run", tier_status.in_words(trouble), TIER_CURE)


# ---- speed: a small probe is written once and read back


PROBE_BYTES = 64 << 20
STORE_PROBE_BYTES = 16 << 20


def try_directory(tier: LocalTier) -> tuple[Path, Capabilities, str]:
    """Return the tried folder, the abilities of its file system, and its speed in words.

    The speed is "" if there is no room to try.

    Raises:
        OSError: it cannot be used.
        TierUnavailable: it does not answer.
    """
    folder = answer_within(tier.url, lambda: _nearest(tier.root))
    scratch = folder / f".tmp-doctor-{secrets.token_hex(8)}"
    return folder, *answer_within(tier.url, lambda: _try(scratch))


def try_store(tier: ObjectStoreTier) -> str:
    """Return the speed of an object store in words.

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
        return _speed(len(data), write_end - start, time.perf_counter() - write_end)
    finally:
        with contextlib.suppress(TrainckptError):
            tier.remove(key)


def _speed(num_bytes: int, write_s: float, read_s: float) -> str:
    write, read = (output.size(int(num_bytes / max(t, 1e-9))) for t in (write_s, read_s))
    return f"writes {write}/s and reads {read}/s ({output.size(num_bytes)}, one process)"


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest existing parent; `OSError` if that is no directory."""
    while True:
        try:
            next(path.iterdir(), None)
        except FileNotFoundError:
            path = path.parent
        else:
            return path


def _try(scratch: Path) -> tuple[Capabilities, str]:
    scratch.mkdir(mode=0o700)
    try:
        capabilities = fs_probe.measure(scratch)
        has_room = not 0 <= capabilities.free_bytes < 2 * PROBE_BYTES
        return capabilities, _measure(scratch / "probe") if has_room else ""
    finally:
        with contextlib.suppress(OSError):
            (scratch / "probe").unlink(missing_ok=True)
            scratch.rmdir()


def _measure(path: Path) -> str:
    """Write the probe to stable storage, read it back, and return both speeds in words."""
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
        return _speed(PROBE_BYTES, write_end - start, time.perf_counter() - write_end)
    finally:
        os.close(descriptor)
