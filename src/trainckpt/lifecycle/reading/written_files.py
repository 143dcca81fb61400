"""Record which files a script under proof writes outside the proof's own folder.

Python reports every file that it opens for writing, and every folder that it makes, to the audit
hooks of its process (PEP 578). What a library writes by itself, such as `torch.save(x, path)`, is
seen only by the folder that was made for it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME = "written"
FOLDER = "folder"  # the proof's own, in its plan
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_TEMPORARY = ("tmp", "torch", "pymp-", "trainckpt")  # names of what libraries keep there


def record_writes(into: Path, own: Path) -> None:
    """Append to `<into>/written-<pid>.jsonl` each path outside `own` that this process writes.

    Caches and temporary files are left out. The hook stays until the process ends.
    """
    file = os.open(into / f"{NAME}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    temporary = os.path.realpath(tempfile.gettempdir())
    folders = [f"{os.path.realpath(folder)}/" for folder in (own, cache)]
    ignored = (*_SYSTEM, *folders, *(f"{temporary}/{name}" for name in _TEMPORARY))
    seen: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = _written(event, arguments)
        if path is None:
            return
        real = os.path.realpath(os.fsdecode(path))
        is_new_folder = event != "os.mkdir" or not os.path.lexists(real)
        if real in seen or real.startswith(ignored) or "/__pycache__/" in real or not is_new_folder:
            return
        seen.add(real)
        os.write(file, json.dumps(real).encode() + b"\n")

    sys.addaudithook(hook)


def read_written(folder: Path) -> list[str]:
    """Return the recorded paths that are there still; of a folder that was made, only itself."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob(f"{NAME}-*.jsonl")]
    paths = {Path(json.loads(line)) for text in texts for line in text.splitlines()}
    whole = [path for path in sorted(paths) if not paths & set(path.parents)]
    return [str(path) for path in whole if os.path.lexists(path)]


def _written(event: str, arguments: tuple[Any, ...]) -> Any:
    """The path that this event writes, or None."""
    if event == "open":
        path, _, flags = arguments
        is_path = isinstance(path, (str, bytes, os.PathLike))
        return path if is_path and isinstance(flags, int) and flags & _WRITES else None
    if event == "os.mkdir":
        return arguments[0]
    return arguments[1] if event == "os.rename" else None
