"""What zstd would save on checkpoints: ratio and speed, by what is compressed.

    pip install zstandard
    python -m benchmarks.compression --json benchmarks/results/compression.json

The example's GPT, 11 M parameters, is trained for some steps on one thread; then its weights (also
rounded to bfloat16), AdamW's two moments, and things that compress well are compressed by one
thread, in blocks of 16 MiB at most, as an upload has parts. `left` is what is left
of the bytes; `breaks_even_mb_per_s` is the speed of compressing: a store that takes more than that
gets them later than without. Nearly all of a checkpoint are weights and moments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import char_gpt
from stdlib_text import VOCABULARY, stdlib_text

PART_BYTES = 16 << 20
LEVELS = (-5, 1, 3)
REPEATS = 3


def trained(steps):
    """The model and its optimizer."""
    torch.manual_seed(0)
    size = char_gpt.SIZES["medium"]
    how = Namespace(dropout=0.1)
    model = char_gpt.GPT(size["layers"], size["width"], size["heads"], size["context"], how)
    optimizer = char_gpt.adamw(model)
    text = torch.from_numpy(stdlib_text()).long()
    for step in range(steps):
        at = torch.randint(len(text) - size["context"] - 1, (4,)).tolist()
        batch = torch.stack([text[a : a + size["context"] + 1] for a in at])
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f} of {len(VOCABULARY)} characters")
    return model, optimizer


def subjects(steps):
    """What is compressed: name -> bytes."""
    model, optimizer = trained(steps)
    weights = [p.detach() for p in model.parameters()]
    moments = list(optimizer.state.values())
    rare = torch.zeros(50_000, 256)  # moments of an embedding of which 2 % of the rows were met
    rare[torch.randperm(len(rare))[: len(rare) // 50]] = torch.randn(len(rare) // 50, 256)
    found = {
        "weights, float32": weights,
        "weights, bfloat16": [w.bfloat16().view(torch.uint8) for w in weights],
        "first moments": [m["exp_avg"] for m in moments],
        "second moments": [m["exp_avg_sq"] for m in moments],
        "a mask, half of it": [torch.rand(4096, 4096) < 0.5],
        "moments of rows, 2 % met": [rare],
        "text as int64": [torch.from_numpy(stdlib_text()).long()],
        "zeros": [torch.zeros(16_000_000)],
    }
    return {
        name: b"".join(t.contiguous().numpy().tobytes() for t in tensors)
        for name, tensors in found.items()
    }


def measure(name, data, level):
    """One row."""
    import zstandard

    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    there, back, small = [], [], []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        small = [zstandard.ZstdCompressor(level=level).compress(part) for part in parts]
        there.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        again = [zstandard.ZstdDecompressor().decompress(part) for part in small]
        back.append(time.perf_counter() - begun)
        assert again == parts
    speed = len(data) / statistics.median(there) / 1e6
    return {
        "what": name,
        "level": level,
        "megabytes": round(len(data) / 1e6, 1),
        "left": round(sum(map(len, small)) / len(data), 4),
        "breaks_even_mb_per_s": round(speed),
        "decompress_mb_per_s": round(len(data) / statistics.median(back) / 1e6),
    }


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, data in subjects(arguments.steps).items():
        for level in LEVELS:
            rows.append(measure(name, data, level))
            print(rows[-1])
    if arguments.json:
        import zstandard

        machine = {
            "cores": os.cpu_count(),
            "threads": 1,
            "steps": arguments.steps,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "zstandard": zstandard.__version__,
        }
        Path(arguments.json).write_text(
            json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
