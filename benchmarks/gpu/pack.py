"""Prepare .gpu/: what a machine with a GPU and without a network lacks.

    python -m benchmarks.gpu.pack [--python 3.12] [PACKAGE ...]

    .gpu/wheels   wheels of the packages for that Python on x86-64; by default those that the core
                  needs and that an environment made for PyTorch rarely has
    .gpu/criu     CRIU as `make criu` installed it; run.sh gives it its new paths there

Copy the project with this folder, and run `sh benchmarks/gpu/run.sh OUT`. Prints the size of both.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from trainckpt.process_dump import criu

FOLDER = Path(__file__).parents[2] / ".gpu"
PACKAGES = ("xxhash>=3.0",)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> int:
    """Make the folder anew."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--python", default="3.12", help="version there (%(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    download(arguments.packages, arguments.python, arguments.folder / "wheels")
    if (criu.INSTALLED / "usr/sbin/criu").is_file():
        shutil.copytree(
            criu.INSTALLED,
            arguments.folder / "criu",
            symlinks=True,
            ignore=shutil.ignore_patterns("share"),
        )
    else:
        print("without CRIU: `make criu` first, to take it along", file=sys.stderr)
    project = [FOLDER.parent / name for name in ("src", "tests", "benchmarks", "examples")]
    for path in (arguments.folder, *project):
        print(f"{size(path) / 1e6:8.1f} MB  {path.name}")
    return 0


def download(packages: list[str], python: str, wheels: Path) -> None:
    """Fetch the wheels by pip."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        *platforms,
        "-d",
        str(wheels),
    ]
    subprocess.run([*command, *packages], check=True)


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    sys.exit(main())
