"""One recording: run a scenario in an empty folder and return all that it left, as flat text.

A recording maps a path of names ("stopped/run/snapshots/s2m1~1.1/manifest.json/cursor/step") to a
value as text. JSON is taken apart to its leaves; of a shard file the header is, and its data is a
digest; of any other file there is a digest. The folder's own name, numbers of processes and tokens
are replaced, so that two recordings of one tree differ only in what time and chance decide.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import s3_servers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
PROGRAM = HERE / "program.py"
LIMIT_S = 180
_TOKEN = re.compile(r"(?<![0-9a-f])[0-9a-f]{16,}(?![0-9a-f])|(?<![0-9a-f])[0-9a-f]{8}(?![0-9a-f.])")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run that is stopped once and resumed.

    Attributes:
        ranks, resumed_ranks: Processes before and after the stop.
        stop: Micro-batch and signal, as `program.py` reads them, or a micro-batch and `PAUSE`:
            `trainckpt pause --dump` is called while rank 0 waits there.
        options: Variables of the environment, `TRAINCKPT_` options above all.
        flags: Of the example, beside those that every scenario has.
    """

    name: str
    stop: str
    ranks: int = 1
    resumed_ranks: int | None = None
    script: str = "char_gpt.py"
    flags: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    encrypted: bool = False
    on_s3: bool = False


def record(scenario: Scenario, folder: Path) -> dict[str, str]:
    """Run a scenario in `folder` with the trainckpt on PYTHONPATH, and return the recording.

    Raises:
        subprocess.TimeoutExpired: a command did not end.
    """
    with ExitStack() as stack:
        return _Recorder(scenario, folder, stack).record()


class _Recorder:
    def __init__(self, scenario: Scenario, folder: Path, stack: ExitStack) -> None:
        self._scenario, self._folder = scenario, folder
        self._run_folder = folder / "run"
        self._run = str(self._run_folder)
        self._recording: dict[str, str] = {}
        self._environment = {
            **os.environ,
            "SCENARIO_KEYS": str(folder / "keys"),
            "PYTHONHASHSEED": "0",
            **scenario.options,
        }
        if scenario.on_s3:
            store = folder / "store"
            server = stack.enter_context(s3_servers.rclone(store))
            self._environment.update(server.environment())
            self._run = f"s3://{s3_servers.BUCKET}/run"
            self._run_folder = store / s3_servers.BUCKET / "run"
        if scenario.encrypted:
            identity = folder / "identity"
            keys = self._call("keygen", "keygen", "--json", str(identity))
            self._environment["TRAINCKPT_ENCRYPT_TO"] = keys["recipient"]
            self._environment["TRAINCKPT_IDENTITY"] = str(identity)

    def record(self) -> dict[str, str]:
        scenario = self._scenario
        name = scenario.stop.partition(":")[2]
        self._environment["SCENARIO_STOP"] = scenario.stop
        launch = [
            "run",
            "--json",
            "--nproc",
            str(scenario.ranks),
            *(["--dumps", "on"] if name == "PAUSE" else []),
            "--",
            str(PROGRAM),
            str(EXAMPLES / scenario.script),
            "--run",
            self._run,
            "--steps",
            "5",
            "--accumulate",
            "2",
            "--save-every",
            "1",
            "--workers",
            "1",
            "--trace",
            str(self._folder / "trace"),
            *scenario.flags,
        ]
        if name == "PAUSE":
            self._pause_during(launch)
        else:
            self._call("run", *launch)
        del self._environment["SCENARIO_STOP"]
        self._look("stopped")
        ranks = ["--nproc", str(scenario.resumed_ranks)] if scenario.resumed_ranks else []
        self._call("resume", "resume", "--json", *ranks, self._run)
        self._look("finished")
        for file in sorted((self._folder / "trace").iterdir()):
            self._recording[f"trace/{file.name}"] = file.read_text()
        for file in sorted((self._folder / "keys").glob("*")):
            for key in file.read_text().split("\n"):  # which rank came last, and wrote, is chance
                self._recording[f"keys/{key}"] = "written"
        return {self._plain(key): self._plain(value) for key, value in self._recording.items()}

    def _look(self, when: str) -> None:
        for file in sorted(self._run_folder.rglob("*")):
            if file.is_file() and "dumps" not in file.relative_to(self._run_folder).parts:
                name = f"{when}/run/{file.relative_to(self._run_folder)}"
                with suppress(FileNotFoundError):
                    self._recording.update(leaves_of_file(name, file))
        for verb in ("list", "show", "verify"):
            self._call(f"{when}/{verb}", verb, "--json", self._run)
        out = self._folder / f"{when}.safetensors"
        self._call(f"{when}/export", "export", "--json", self._run, str(out))
        if out.exists():
            self._recording.update(leaves_of_file(f"{when}/exported", out))

    def _call(self, name: str, *arguments: str) -> Any:
        """Run a verb; record its exit code and its JSON, which is returned."""
        done = subprocess.run(
            [sys.executable, "-m", "trainckpt", *arguments],
            env=self._environment,
            text=True,
            cwd=self._folder,
            capture_output=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        with (self._folder / "log.txt").open("a") as log:
            log.write(f"$ {' '.join(arguments)}\n{done.stderr}{done.stdout}\n")
        return self._note(name, done.returncode, done.stdout)

    def _note(self, name: str, code: int, stdout: str) -> Any:
        self._recording[f"{name}/exit code"] = str(code)
        lines = stdout.strip()
        try:
            value = json.loads(lines[lines.index("{") :])
        except ValueError:
            return None
        self._recording.update(leaves(f"{name}/json", value))
        return value

    def _pause_during(self, launch: list[str]) -> None:
        with (self._folder / "log.txt").open("a") as log, (self._folder / "out").open("w+") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainckpt", *launch],
                env=self._environment,
                stdout=out,
                stderr=log,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
            )
            try:
                until = time.monotonic() + LIMIT_S
                while not (self._folder / "trace" / "waits").exists():
                    if process.poll() is not None or time.monotonic() > until:
                        break
                    time.sleep(0.1)
                self._call("pause", "pause", "--json", "--dump", self._run)
                code = process.wait(LIMIT_S)
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            self._note("run", code, out.read())

    def _plain(self, text: str) -> str:
        text = text.replace(str(self._folder), "<folder>")
        return _TOKEN.sub("#", text.replace(os.environ["PYTHONPATH"], "<path>"))


def leaves_of_file(name: str, file: Path) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a file of the run: JSON and shard headers taken apart, else a digest."""
    data = file.read_bytes()
    if file.suffix == ".json":
        with suppress(ValueError):
            yield from leaves(name, json.loads(data))
            return
    if file.suffix == ".safetensors" and len(data) > 8:
        length = int.from_bytes(data[:8], "little")
        with suppress(ValueError):
            header = json.loads(data[8 : 8 + length])
            yield from leaves(f"{name}/header", header)
            data = data[8 + length :]
    yield f"{name}/bytes", f"{len(data)}, digest {hashlib.sha256(data).hexdigest()[:12]}"


def leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every leaf of a JSON value with its path. Text that is JSON is taken apart too."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(f"{name}/{key}", item)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from leaves(f"{name}/{number}", item)
    else:
        yield name, json.dumps(value)
