"""A file system that takes O_DIRECT when a file is opened, and refuses it when it is used.

    python -m tests.faults.refusing FOLDER BACKING

Whatever is done under FOLDER is done to the same file under BACKING. Only what goes past the page
cache and beyond the first two pages of a file is refused (EINVAL): so the trial of the run's place
finds O_DIRECT working, and the first shard file that is written, or read, finds that it does not.

The kernel's side of FUSE is spoken here directly; there is nothing to install. One request after
the other, and answers are never kept by the kernel, so what is seen is what is there.
"""

# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108
# What is asked for is a system call, and is answered by the same one.

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from tests.faults.dead_mount import LIBC

ALLOWED_BYTES = 8192  # what the trial of a place writes past the page cache
MOST_BYTES = 1 << 20  # of one write
HEADER, ANSWER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ENTRY, ATTRIBUTES = struct.Struct("<QQQQII"), struct.Struct("<QII")
STAT = struct.Struct("<6Q10I")
IO = struct.Struct("<QQIIQII")  # handle, place, size, ...; the flags of the open file last but one
SET = struct.Struct("<IIQQQQQQIIIIIIII")
SET_MODE, SET_OWNER, SET_GROUP, SET_SIZE = 1, 2, 4, 8
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22
NO_ANSWER = {2, 36, 42}  # forget, interrupt, forget several


class Server:
    """Nodes are open descriptors (O_PATH), so that a rename needs nothing; handles as well."""

    def __init__(self, backing: str) -> None:
        self.nodes = {1: os.open(backing, os.O_PATH | os.O_DIRECTORY)}
        self.lookups: dict[int, int] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.newest = 1

    def serve(self, kernel: int) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(kernel, MOST_BYTES + 65536)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node, *_ = HEADER.unpack_from(request)
            code, answer = self.answer(opcode, node, memoryview(request)[HEADER.size :])
            if opcode not in NO_ANSWER:
                size = ANSWER.size + len(answer)
                with contextlib.suppress(FileNotFoundError):  # who asked was killed
                    os.write(kernel, ANSWER.pack(size, -code, unique) + answer)

    def answer(self, opcode: int, node: int, body: memoryview) -> tuple[int, bytes]:
        act = self.ACTS.get(opcode)
        if act is None:
            return errno.ENOSYS, b""
        try:
            return 0, act(self, node, body) or b""
        except OSError as error:
            return error.errno or errno.EIO, b""

    def path(self, node: int) -> str:
        return f"/proc/self/fd/{self.nodes[node]}"

    def inside(self, node: int, name: memoryview) -> str:
        return f"{self.path(node)}/{text(name)}"

    # ---- names

    def entry(self, node: int, name: memoryview) -> bytes:
        descriptor = os.open(self.inside(node, name), os.O_PATH | os.O_NOFOLLOW)
        found = os.fstat(descriptor)
        key = (found.st_dev, found.st_ino)
        number = self.numbers.get(key)
        if number is None:
            self.newest = number = self.newest + 1
            self.numbers[key], self.nodes[number], self.lookups[number] = number, descriptor, 0
        else:
            os.close(descriptor)
        self.lookups[number] += 1
        return ENTRY.pack(number, 0, 0, 0, 0, 0) + packed(found)

    def forget(self, node: int, body: memoryview) -> None:
        self._forget(node, *struct.unpack_from("<Q", body))

    def forget_several(self, node: int, body: memoryview) -> None:
        (count,) = struct.unpack_from("<I", body)
        for which, times in struct.iter_unpack("<QQ", body[8 : 8 + 16 * count]):
            self._forget(which, times)

    def _forget(self, node: int, times: int) -> None:
        if node == 1:
            return
        self.lookups[node] -= times
        if self.lookups[node] <= 0:
            descriptor = self.nodes.pop(node)
            found = os.fstat(descriptor)
            del self.numbers[found.st_dev, found.st_ino], self.lookups[node]
            os.close(descriptor)

    def make_folder(self, node: int, body: memoryview) -> bytes:
        mode, _ = struct.unpack_from("<II", body)
        os.mkdir(self.inside(node, body[8:]), mode)
        return self.entry(node, body[8:])

    def remove(self, node: int, body: memoryview) -> None:
        os.unlink(self.inside(node, body))

    def remove_folder(self, node: int, body: memoryview) -> None:
        os.rmdir(self.inside(node, body))

    def rename(self, node: int, body: memoryview) -> None:
        self._rename(node, body, 8)

    def rename_with_flags(self, node: int, body: memoryview) -> None:
        if struct.unpack_from("<I", body, 8) != (0,):
            raise OSError(errno.EINVAL, "")
        self._rename(node, body, 16)

    def _rename(self, node: int, body: memoryview, at: int) -> None:
        (folder,) = struct.unpack_from("<Q", body)
        old, new, _ = bytes(body[at:]).split(b"\0", 2)
        os.rename(self.inside(node, memoryview(old)), self.inside(folder, memoryview(new)))

    def link(self, node: int, body: memoryview) -> bytes:
        (source,) = struct.unpack_from("<Q", body)
        # With a folder named (of no matter here) Python asks for the link to be followed.
        os.link(self.path(source), self.inside(node, body[8:]), src_dir_fd=self.nodes[1])
        return self.entry(node, body[8:])

    # ---- files

    def attributes(self, node: int, body: memoryview) -> bytes:
        return ATTRIBUTES.pack(0, 0, 0) + packed(os.fstat(self.nodes[node]))

    def set_attributes(self, node: int, body: memoryview) -> bytes:
        valid, _, _, size, *rest = SET.unpack_from(body)
        mode, uid, gid = rest[7], rest[9], rest[10]
        if valid & SET_MODE:
            os.chmod(self.path(node), mode & 0o7777)
        if valid & (SET_OWNER | SET_GROUP):
            os.chown(
                self.path(node), uid if valid & SET_OWNER else -1, gid if valid & SET_GROUP else -1
            )
        if valid & SET_SIZE:
            os.truncate(self.path(node), size)
        return self.attributes(node, body)

    def open_file(self, node: int, body: memoryview) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        return opened(os.open(self.path(node), flags & os.O_ACCMODE))

    def create(self, node: int, body: memoryview) -> bytes:
        flags, mode, *_ = struct.unpack_from("<4I", body)
        kept = flags & (os.O_ACCMODE | os.O_EXCL | os.O_TRUNC) | os.O_CREAT
        handle = os.open(self.inside(node, body[16:]), kept, mode)
        return self.entry(node, body[16:]) + opened(handle)

    def read(self, node: int, body: memoryview) -> bytes:
        handle, place, size, *_, flags, _ = IO.unpack_from(body)
        self.look_at(flags, place + size)
        return os.pread(handle, size, place)

    def write(self, node: int, body: memoryview) -> bytes:
        handle, place, size, *_, flags, _ = IO.unpack_from(body)
        self.look_at(flags, place + size)
        return struct.pack("<II", os.pwrite(handle, body[IO.size :][:size], place), 0)

    def look_at(self, flags: int, end: int) -> None:
        """Refuse a read or write past the page cache, up to `end`, unless it is a trial."""
        if flags & os.O_DIRECT and end > ALLOWED_BYTES:
            raise OSError(errno.EINVAL, "")

    def reserve(self, node: int, body: memoryview) -> None:
        handle, place, size, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "")
        os.posix_fallocate(handle, place, size)

    def sync(self, node: int, body: memoryview) -> None:
        os.fsync(struct.unpack_from("<Q", body)[0])

    def release(self, node: int, body: memoryview) -> None:
        os.close(struct.unpack_from("<Q", body)[0])

    # ---- folders

    def open_folder(self, node: int, body: memoryview) -> bytes:
        return opened(os.open(self.path(node), os.O_RDONLY | os.O_DIRECTORY))

    def list_folder(self, node: int, body: memoryview) -> bytes:
        handle, first, room, *_ = IO.unpack_from(body)
        found = b""
        for number, name in enumerate([".", "..", *self.names(handle)][first:], first + 1):
            raw = name.encode()
            one = struct.pack("<QQII", number, number, len(raw), 0) + raw
            one += b"\0" * (-len(one) % 8)
            if len(found) + len(one) > room:
                break
            found += one
        return found

    def names(self, handle: int) -> list[str]:
        return sorted(os.listdir(handle))

    # ---- the file system

    def begin(self, node: int, body: memoryview) -> bytes:
        major, minor, ahead, _ = struct.unpack_from("<4I", body)
        pages = MOST_BYTES // 4096
        return struct.pack(
            "<4IHHIIHH8I",
            major,
            min(minor, 31),
            ahead,
            BIG_WRITES | MAX_PAGES,
            16,
            12,
            MOST_BYTES,
            1,
            pages,
            0,
            *[0] * 8,
        )

    def room(self, node: int, body: memoryview) -> bytes:
        found = os.statvfs(self.path(node))
        return struct.pack(
            "<5Q10I",
            found.f_blocks,
            found.f_bfree,
            found.f_bavail,
            found.f_files,
            found.f_ffree,
            found.f_bsize,
            255,
            found.f_frsize,
            *[0] * 7,
        )

    def nothing(self, node: int, body: memoryview) -> None:
        """Done at once."""

    ACTS: ClassVar[dict[int, Any]] = {
        1: entry,
        2: forget,
        3: attributes,
        4: set_attributes,
        9: make_folder,
        10: remove,
        11: remove_folder,
        12: rename,
        13: link,
        14: open_file,
        15: read,
        16: write,
        17: room,
        18: release,
        20: sync,
        25: nothing,
        26: begin,
        27: open_folder,
        28: list_folder,
        29: release,
        30: sync,
        35: create,
        36: nothing,
        38: nothing,
        42: forget_several,
        43: reserve,
        45: rename_with_flags,
    }


def text(name: memoryview) -> str:
    return os.fsdecode(bytes(name).partition(b"\0")[0])


def opened(handle: int) -> bytes:
    return struct.pack("<QII", handle, 0, 0)


def packed(found: os.stat_result) -> bytes:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return STAT.pack(
        found.st_ino,
        found.st_size,
        found.st_blocks,
        *(each // 10**9 for each in times),
        *(each % 10**9 for each in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        found.st_rdev,
        found.st_blksize,
        0,
    )


@contextlib.contextmanager
def mounted(folder: Path, backing: Path, module: str = __name__):
    """`folder` is the file system that `module` serves; its bytes lie in `backing`. Yields the
    server's process, whose standard input is a pipe.
    """
    folder.mkdir()
    backing.mkdir(exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, "-m", module, folder, backing],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout.readline() == b"mounted\n"
        yield server
    finally:
        LIBC.umount2(str(folder).encode(), 2)  # MNT_DETACH; then the server ends
        server.stdin.close()
        server.stdout.close()
        server.terminate()
        server.wait()


def serve(kind: type[Server]) -> None:
    """Mount the folder of the command line, and answer until it is unmounted."""
    folder, backing = sys.argv[1:]
    kernel = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={kernel},rootmode=40000,user_id=0,group_id=0,default_permissions"
    if LIBC.mount(b"refusing", folder.encode(), b"fuse.refusing", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    server = kind(backing)
    print("mounted", flush=True)
    server.serve(kernel)


if __name__ == "__main__":
    serve(Server)
