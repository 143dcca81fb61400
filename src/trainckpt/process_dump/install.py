"""Installs CRIU: `python -m trainckpt.process_dump.install [FOLDER]`. Debian; needs no root.

Debian 12 has CRIU 3.17, which knows nothing of newer kernels' vDSO, and a newer package would
replace the system's C library. So the package of a newer release is unpacked into a folder of its
own, together with every library that it needs, and the program is told to look there and nowhere
else (patchelf, from the same release). No LD_LIBRARY_PATH: what CRIU restores would inherit it.

apt works with lists, status and archives of its own, which are removed again: the system's sources
and packages stay as they are. A CRIU that already works in FOLDER is left alone; one that was moved
there from another place, whose paths it still has, is only given its new ones.

Exit code: 0 there is one that runs; 1 there is not, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trainckpt.process_dump.criu import INSTALLED, version_of

SUITE = "forky"
MIRROR = "http://deb.debian.org/debian"
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PROGRAM = Path("usr/sbin/criu")
SAID_BYTES = 400
_MIRROR = re.compile(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s+)?)(\S+/debian)/?(?:\s|$)", re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Install CRIU into the named folder, or beside this Python; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=INSTALLED)
    folder = parser.parse_args(arguments).folder.absolute()
    if version_of(folder / PROGRAM) is not None:
        return 0
    if (folder / PROGRAM).is_file():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _patch(folder)
            return 0
    why_not = _why_not()
    if why_not:
        print(f"CRIU is not installed: {why_not}", file=sys.stderr)  # noqa: T201 - a command
        return 1
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".criu-", dir=folder.parent) as scratch:
            _install(Path(scratch), folder)
    except (OSError, subprocess.CalledProcessError) as error:
        error_text = (getattr(error, "stderr", "") or str(error)).strip()[-SAID_BYTES:]
        print(f"CRIU could not be installed: {error_text}", file=sys.stderr)  # noqa: T201 - a command
        return 1
    return 0


def _why_not() -> str:
    if not sys.platform.startswith("linux"):
        return "CRIU is a program for Linux"
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: take it from your distribution, 4.0 or later"
    if not Path(KEYRING).is_file():
        return f"{KEYRING} is missing (package debian-archive-keyring)"
    return ""


def _install(scratch: Path, folder: Path) -> None:
    """Unpack everything in `scratch`, then rename the result to `folder`."""
    unpacked = scratch / "found"
    for package in download(scratch, SUITE, "criu", "patchelf"):
        _run("dpkg", "-x", str(package), str(unpacked))
    shutil.rmtree(folder, ignore_errors=True)  # a CRIU failing to run
    unpacked.rename(folder)
    _patch(folder)


def _patch(folder: Path) -> None:
    """Set the program's linker and library paths to their present location, and run it."""
    loader = _loader(folder)
    patchelf = [str(loader), "--library-path", str(loader.parent), str(folder / "usr/bin/patchelf")]
    _run(
        *patchelf,
        "--set-interpreter",
        str(loader),
        "--set-rpath",
        str(loader.parent),
        "--force-rpath",
        str(folder / PROGRAM),
    )
    _run(str(folder / PROGRAM), "--version")


def download(scratch: Path, suite: str, *names: str) -> list[Path]:
    """Download packages and all their dependencies, as if nothing were installed."""
    for subfolder in ("lists/partial", "cache/archives/partial"):
        (scratch / subfolder).mkdir(parents=True)
    (scratch / "status").touch()
    source = f"deb [signed-by={KEYRING}] {_mirror()} {suite} main\n"
    (scratch / "sources.list").write_text(source, encoding="utf-8")
    options = {
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": os.devnull,
        "Dir::Etc::preferencesparts": os.devnull,
        "Dir::Etc::preferences": os.devnull,
        "Dir::State": scratch,
        "Dir::State::status": scratch / "status",
        "Dir::State::extended_states": scratch / "extended",
        "Dir::Cache": scratch / "cache",
        "Acquire::Retries": 3,
        "Acquire::Languages": "none",
        "APT::Install-Recommends": 0,
        "APT::Sandbox::User": "",
        "Debug::NoLocking": 1,  # no other process uses these lists
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    _run(*apt, "update")
    _run(*apt, "install", "--download-only", "--yes", *names)
    return sorted((scratch / "cache/archives").glob("*.deb"))


def _mirror() -> str:
    """Return the mirror of the system's own Debian packages."""
    for path in SOURCES:
        if Path(path).is_file():
            match = _MIRROR.search(Path(path).read_text(encoding="utf-8"))
            if match:
                return match[1]
    return MIRROR


def _loader(folder: Path) -> Path:
    """Return the dynamic linker beside the unpacked C library."""
    for path in sorted(folder.glob("usr/lib/*/ld-linux*.so.*")):
        return path
    raise OSError(f"the packages of {SUITE} hold no dynamic linker")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
