"""Another Python and torch: a Debian release with its own python3-torch, in a folder.

    python -m tests.versions.debian trixie COMMAND...    # Python 3.13, torch 2.6.0
    python -m tests.versions.debian forky COMMAND...     # Python 3.14, torch 2.14.1

The packages are unpacked, not installed, into `.venv/<release>`, and this package's other
requirements by pip into a folder there. A command is entered by unshare and chroot, as root, with
/proc, /dev, /sys and /tmp of this machine, and this repository where it lies here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from trainckpt.process_dump import install

ROOT = Path(__file__).parents[2]
PYTHON = {"trixie": "3.13", "forky": "3.14"}
PACKAGES = ("python3-torch", "python3-numpy", "coreutils", "bash", "dash", "libc-bin", "base-files")
PACKAGES += ("mount", "git")
# With what the core's tests import; torch is Debian's.
MORE = (
    "cryptography",
    "hypothesis",
    "nvidia-ml-py",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "pyyaml",
)
SITE = "usr/local/lib/python{}/dist-packages"  # where pip would install them as root
MACHINE = sysconfig.get_config_var("MULTIARCH")  # x86_64-linux-gnu
WITHOUT_LIBUV = """

_make_store = TCPStore.__init__
TCPStore.__init__ = lambda *args, **how: _make_store(*args, **{**how, "use_libuv": False})
"""
BOUND = ("proc", "dev", "sys", "tmp")


def why_not() -> str:
    """Return why no release can be unpacked and entered here, or ""."""
    missing = [name for name in ("apt-get", "dpkg", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    return "" if os.geteuid() == 0 else "a chroot is entered as root"


def unpacked(release: str) -> Path:
    """Return the folder of a release, made on the first call: 250 MB from the network."""
    folder = ROOT / ".venv" / release
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=folder.parent) as scratch:
        found = Path(scratch) / "found"
        found.mkdir()
        _link_usr(found)
        for package in install.download(Path(scratch), release, *PACKAGES):
            subprocess.run(["dpkg", "-x", package, found], check=True)
        for name in ("hosts", "passwd", "group"):
            shutil.copy(f"/etc/{name}", found / "etc" / name)
        _let_torch_do_without_libuv(found)
        _install_requirements(release, found / SITE.format(PYTHON[release]))
        for name in (*BOUND, *ROOT.parts[1:2]):
            (found / name).mkdir(exist_ok=True)
        # Where Debian's alternatives, which dpkg's scripts make, would point.
        libraries = "".join(f"/usr/lib/{MACHINE}/{one}\n" for one in ("blas", "lapack"))
        (found / "etc/ld.so.conf.d").mkdir(parents=True, exist_ok=True)
        (found / "etc/ld.so.conf.d/alternatives.conf").write_text(libraries)
        subprocess.run(["chroot", found, "ldconfig"], check=True)
        found.rename(folder)
    return folder


def _link_usr(folder: Path) -> None:
    """Make the links that a release without /bin and /lib of their own has."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")


def _let_torch_do_without_libuv(folder: Path) -> None:
    """Make every TCPStore the one that Debian's torch has; torch asks for the other one."""
    path = folder / "usr/lib/python3/dist-packages/torch/distributed/__init__.py"
    path.write_text(path.read_text(encoding="utf-8") + WITHOUT_LIBUV)


def _install_requirements(release: str, target: Path) -> None:
    """Install what the package and its tests need, without torch, for the release's Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [one for one in project["dependencies"] if not one.startswith("torch")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["-c", str(ROOT / "constraints.txt"), "--only-binary=:all:", "--no-compile"]
    command += ["--python-version", PYTHON[release], "--target", str(target)]
    subprocess.run([*command, *needed, *MORE], check=True)


def command_in(release: str, *words: str) -> list[str]:
    """Return the command that runs these words inside the release, in the repository's folder."""
    folder = unpacked(release)
    inner = f"{folder}{ROOT}"
    binds = [f"mount --rbind /{name} '{folder}/{name}'" for name in BOUND]
    binds += [f"mkdir -p '{inner}'", f"mount --rbind '{ROOT}' '{inner}'"]
    script = " && ".join([*binds, f"exec chroot '{folder}' env -C '{ROOT}' \"$@\""])
    settings = [f"PYTHONPATH={ROOT}/src:{ROOT}", "PYTHONDONTWRITEBYTECODE=1"]
    settings += ["PATH=/usr/bin:/bin", "HOME=/tmp", "OMP_NUM_THREADS=1"]
    return ["unshare", "-m", "sh", "-c", script, "sh", "-i", *settings, *words]


if __name__ == "__main__":
    os.execvp("unshare", command_in(sys.argv[1], *sys.argv[2:]))
