"""Launch to first step of a script with torch.compile: with and without its compile caches.

Every launch is a `trainckpt run` of the same script that resumes the same snapshot; they differ in
what was compiled before. In each round the kinds take turns, each time another one first.

    plain  without torch.compile
    cold   no compile caches
    warm   the caches of an earlier launch on this host
    tier   no caches on this host: they are fetched from a slower tier, a directory

A launch begins with the command and ends when its first step is done. `step_s` is that step alone,
with all compilation in it; the ratio of two kinds is that of their medians. A launch is refused if
the compiler's counters are not those of its kind, or if its loss has other bits.

    python -m benchmarks.warm_start --json benchmarks/results/warm_start.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PREPARE = "prepare"
KINDS = PLAIN, COLD, WARM, TIER = "plain", "cold", "warm", "tier"
LIMIT_S = 900.0
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 128, 4, 64, 8
FIRST_STEPS = 3  # of the preparing launch, before it waits for the copy


# ---- the script


def job(given: argparse.Namespace) -> None:
    """What is launched: build, resume, one step, note when; then be gone."""
    import torch
    from torch._dynamo.utils import counters
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    import trainckpt

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import char_gpt

    torch.manual_seed(0)
    model = char_gpt.GPT(LAYERS, WIDTH, HEADS, CONTEXT, argparse.Namespace(dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters())
    num_characters = model.head.out_features
    text = torch.randint(num_characters, (64 * BATCH, CONTEXT + 1))
    loader = DataLoader(TensorDataset(text), batch_size=BATCH, shuffle=True)

    def loss_of(text: torch.Tensor) -> torch.Tensor:
        logits = model(text[:, :-1])
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    step = loss_of if given.kind == PLAIN else torch.compile(loss_of)
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    ckpt = trainckpt.Checkpointer(None, tiers=[given.tier], every="never", **tracked)
    ckpt.resume()
    for (batch,) in ckpt.batches():
        begun = time.monotonic()
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if given.kind != PREPARE:
            break
        if ckpt.cursor.step == FIRST_STEPS:
            pending = ckpt.save()
        if ckpt.cursor.step > FIRST_STEPS + 1:
            pending.wait("durable")
            while not any(Path(given.tier, "compile-cache").glob("*.json")):
                time.sleep(0.1)
            break
    at, cached = time.monotonic(), counters["inductor"]
    note = {
        "at": at,
        "step_s": at - begun,
        "loss": loss.item().hex(),
        "hits": cached["fxgraph_cache_hit"],
        "misses": cached["fxgraph_cache_miss"],
        "step": ckpt.cursor.step,
    }
    given.mark.with_suffix(".tmp").write_text(json.dumps(note))
    given.mark.with_suffix(".tmp").rename(given.mark)
    os._exit(0)  # nothing is saved, and no attempt finishes: the next one resumes the same


# ---- outside


class Bench:
    """Launches in one folder: a run, its tier, and the caches of hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "cache"
        self.launch(PREPARE, self.kept, "tiers")
        # The caches of "host" lie in another folder than those that are copied.
        self.launch(WARM, self.kept, "host")

    def measure(self, kind: str) -> dict[str, Any]:
        """Launch once; return its note, with the seconds since the command as `launch_s`."""
        empty = self.folder / "empty"
        place = self.kept if kind in (WARM, PLAIN) else empty
        try:
            note = self.launch(kind, place, "tiers" if kind == TIER else "host")
        finally:
            shutil.rmtree(empty, ignore_errors=True)
        wanted = {PLAIN: (False, False), COLD: (False, True)}.get(kind, (True, False))
        if (note["hits"] > 0, note["misses"] > 0) != wanted:
            raise RuntimeError(f"{kind}: {note}")
        return note

    def launch(self, kind: str, cache: Path, reach: str) -> dict[str, Any]:
        """Launch with the caches in a folder; return the note of its first step."""
        mark = self.folder / "note"
        mark.unlink(missing_ok=True)
        launcher = [sys.executable, "-m", "trainckpt", "run", "--run", str(self.folder / "run")]
        script = ["-m", "benchmarks.warm_start", "--kind", kind, "--mark", str(mark)]
        begun = time.monotonic()
        done = subprocess.run(
            [*launcher, "--compile-cache", reach, *script, "--tier", str(self.folder / "tier")],
            env={**os.environ, "TRAINCKPT_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if not mark.exists():
            raise RuntimeError(f"{kind}: exit code {done.returncode}\n{done.stderr}")
        note: dict[str, Any] = json.loads(mark.read_text())
        return {**note, "launch_s": note["at"] - begun}


def rows(bench: Bench, num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each kind, over interleaved rounds."""
    notes: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(num_rounds):
        first = number % len(KINDS)
        for kind in (*KINDS[first:], *KINDS[:first]):
            notes[kind].append(bench.measure(kind))
        taken = (f"{kind} {notes[kind][-1]['launch_s']:.2f} s" for kind in KINDS)
        print(", ".join(taken), file=sys.stderr)
    losses = {note["loss"] for kind in (COLD, WARM, TIER) for note in notes[kind]}
    if len(losses) != 1:
        raise RuntimeError(f"the compiled losses are not equal: {losses}")
    return [row(kind, notes[kind], notes[COLD]) for kind in KINDS]


def row(kind: str, notes: list[dict[str, Any]], cold: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of a kind, and their ratios to those of cold launches."""
    result: dict[str, Any] = {"kind": kind, "rounds": len(notes)}
    for name in ("launch_s", "step_s"):
        times, colds = ([note[name] for note in some] for some in (notes, cold))
        result[name] = round(statistics.median(times), 3)
        ratio = statistics.median(times) / statistics.median(colds)
        result[f"{name.removesuffix('_s')}_of_cold"] = round(ratio, 3)
        result[f"{name}_each"] = [round(one, 3) for one in times]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.warm_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    for hidden in ("--kind", "--tier"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--mark", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kind:
        job(given)
        return
    from benchmarks.machine import words

    with tempfile.TemporaryDirectory(prefix="trainckpt-warm-start-", dir=Path.cwd()) as folder:
        measured = rows(Bench(Path(folder)), given.rounds)
    for one in measured:
        print(json.dumps(one))
    if given.json:
        command = shlex.join(["python", "-m", "benchmarks.warm_start", *sys.argv[1:]])
        result = {"machine": words(), "command": command, "rows": measured}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
