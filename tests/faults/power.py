"""A disk that records what it is told, and what a power cut may leave of it.

The rules are those of POSIX, read strictly: the bytes of a file are safe after its fsync, a name
(created, linked, renamed, removed) after the fsync of its folder. Anything else may each have
happened or not, whatever the order; unsynced bytes may also be there by half, at their place. What
several threads do stands in the list in the order in which it was over: what was still being
written when the file was synced is not safe.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

from trainckpt.storage.local import Disk

MOST_EXHAUSTIVE = 12  # unsynced operations tried in all combinations; beyond, a sample
SAMPLES = 200


class RecordingDisk(Disk):
    """Does what it is told, and keeps a list of it."""

    def __init__(self):
        self.done = []

    def _note(self, *operation):
        self.done.append(operation)

    def make_folder(self, path):
        super().make_folder(path)
        self._note("mkdir", path)

    def create(self, path):
        descriptor = super().create(path)
        self._note("create", path)
        return descriptor

    def reserve(self, path, descriptor, num_bytes):
        super().reserve(path, descriptor, num_bytes)
        self._note("reserve", path, num_bytes)

    def write(self, path, descriptor, block, first_byte):
        super().write(path, descriptor, block, first_byte)
        self._note("write", path, first_byte, bytes(block))

    def sync(self, path, descriptor):
        super().sync(path, descriptor)
        self._note("sync", path)

    def sync_folder(self, path):
        super().sync_folder(path)
        self._note("sync folder", path)

    def rename(self, source, target):
        super().rename(source, target)
        self._note("rename", source, target)

    def link(self, source, target):
        super().link(source, target)
        self._note("link", source, target)

    def remove(self, path):
        super().remove(path)
        self._note("remove", path)

    def remove_folder(self, path):
        super().remove_folder(path)
        self._note("rmdir", path)


class KilledDisk(RecordingDisk):
    """Of a process that is killed each time before it syncs a folder."""

    def sync_folder(self, path):
        pass


class LateDisk(RecordingDisk):
    """A write of each file is over only when it was synced, as with a writer nobody awaits."""

    def __init__(self):
        super().__init__()
        self._late = {}

    def write(self, path, descriptor, block, first_byte):
        if path.suffix == ".safetensors" and path not in self._late:
            self._late[path] = ("write", path, first_byte, bytes(block))
            Disk.write(self, path, descriptor, block, first_byte)
        else:
            super().write(path, descriptor, block, first_byte)

    def sync(self, path, descriptor):
        super().sync(path, descriptor)
        if path in self._late:
            self._note(*self._late.pop(path))


class ForgetfulDisk(RecordingDisk):
    """Syncs nothing: with it every promise about power cuts must fail."""

    def sync(self, path, descriptor):
        pass

    def sync_folder(self, path):
        pass


@dataclass
class Pending:
    """One operation that is not on stable storage yet."""

    names: tuple  # (folder, name, number of the file or None), ... as it would make them
    number: int = 0
    first_byte: int = 0
    data: bytes | None = None
    length: int = 0  # that the file has at least
    most: int | None = None  # that it has at most


@dataclass
class Storage:
    """What is on stable storage, and what may be."""

    names: dict = field(default_factory=dict)  # path -> number of the file, "folder"
    data: dict = field(default_factory=dict)  # number -> bytes, zeros where none were written
    pending: list = field(default_factory=list)
    seen: dict = field(default_factory=dict)  # path -> number, as the running system sees it
    files: int = 0

    def apply(self, operation):
        kind, path, *rest = operation
        if kind == "create":
            self.files += 1
            self.data[self.files] = b""
            self._name(path, self.files)
        elif kind == "mkdir":
            self._name(path, "folder")
        elif kind == "link":
            self._name(rest[0], self.seen[path])
        elif kind == "rename":
            number = self.seen.pop(path)
            self.seen[rest[0]] = number
            self.pending.append(Pending(((path, None), (rest[0], number))))
        elif kind in ("remove", "rmdir"):
            del self.seen[path]
            self.pending.append(Pending(((path, None),)))
        elif kind == "write":
            self.pending.append(Pending((), self.seen[path], *rest))
        elif kind == "reserve":
            self.pending.append(Pending((), self.seen[path], length=rest[0]))
        elif kind == "sync":
            self._settle(lambda p: p.number == self.seen[path])
        elif kind == "sync folder":
            self._settle(lambda p: any(name.parent == path for name, _ in p.names))

    def _name(self, path, number):
        self.seen[path] = number
        self.pending.append(Pending(((path, number),)))

    def _settle(self, which):
        for pending in [p for p in self.pending if which(p)]:
            self._happen(pending, self.names, self.data)
            self.pending.remove(pending)

    @staticmethod
    def _happen(pending, names, data, part=1.0):
        if pending.number:
            written = (pending.data or b"")[: int(len(pending.data or b"") * part)]
            end = pending.first_byte + len(written) if written else 0
            was = data[pending.number].ljust(max(end, pending.length), b"\0")[: pending.most]
            data[pending.number] = was[: pending.first_byte] + written + was[end:] if end else was
        for path, number in pending.names:
            if number is None:
                names.pop(path, None)
            else:
                names[path] = number

    def outcomes(self, dice):
        """Every state a power cut may leave now: path -> bytes, None for a folder."""
        choices = [(0.0, 0.5, 1.0) if p.data is not None else (0.0, 1.0) for p in self.pending]
        if len(choices) <= MOST_EXHAUSTIVE:
            combinations = itertools.product(*choices)
        else:
            combinations = [[dice.choice(c) for c in choices] for _ in range(SAMPLES)]
        for chosen in combinations:
            names, data = dict(self.names), dict(self.data)
            for pending, part in zip(self.pending, chosen, strict=True):
                if part:
                    self._happen(pending, names, data, part)
            yield {
                path: None if number == "folder" else data[number]
                for path, number in names.items()
                if self._reachable(path, names)
            }

    def _reachable(self, path, names):
        return all(
            parent == self.root or names.get(parent) == "folder"
            for parent in itertools.takewhile(lambda p: p != self.root.parent, path.parents)
        )

    root: Path = Path()


def power_cuts(done, root, seed=0, first=0):
    """(operations completed, state) for a cut after `first` or more; each state once a count."""
    storage, dice = Storage(root=root), random.Random(seed)
    for number, operation in enumerate([None, *done]):
        if operation is not None:
            storage.apply(operation)
        if number < first:
            continue
        seen = set()
        for state in storage.outcomes(dice):
            key = hash(frozenset(state.items()))
            if key not in seen:
                seen.add(key)
                yield number, state


def restore(state, root, place):
    """Make `place` look as the state says `root` would."""
    for path in sorted(state):
        target = place / path.relative_to(root)
        if state[path] is None:
            target.mkdir()
        else:
            target.write_bytes(state[path])
