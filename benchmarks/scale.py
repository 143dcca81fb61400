"""Plans of a 405B-parameter model for up to 16,384 ranks, by the code that real runs use.

    python -m benchmarks.scale [--json OUT] [--rounds N]

Seconds are of CPU time. Nothing is trained and no tensor is made: the save plan, the reports, the
commit's writer, the manifest and the restore plan into the other layout are what is measured, for
three ranks of each world (the first, one in the middle, the last), medians over the rounds, the
worst of the three.

    tp8-pp16   tensor parallel 8, pipeline parallel 16 (2 in the world of 16), the rest FSDP2
    fsdp       FSDP2 over all ranks
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

from trainckpt.format import manifest as manifests
from trainckpt.format import shard_file
from trainckpt.format.cursor import Cursor
from trainckpt.format.digest import digest
from trainckpt.format.json_io import canonical
from trainckpt.format.layout import Layout, replicated, whole
from trainckpt.format.manifest import FileEntry, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName, shard_file_name
from trainckpt.format.shard_file import Region, ShardHeader
from trainckpt.snapshot.commit import merge_tables, table_from_json, table_to_json
from trainckpt.snapshot.restore_plan import Planner, plan_restore
from trainckpt.snapshot.save_plan import equal_groups, plan_save

WORLDS = (16, 256, 4096, 16384)
LAYERS, HIDDEN, FFN, VOCABULARY, KEYS = 126, 16384, 53248, 128256, 1024
TP = 8
D = digest(b"")

# name -> (shape, how tensor parallelism divides it: by rows, by columns, not)
LAYER = {
    "attention.q.weight": ((HIDDEN, HIDDEN), 0),
    "attention.k.weight": ((KEYS, HIDDEN), 0),
    "attention.v.weight": ((KEYS, HIDDEN), 0),
    "attention.o.weight": ((HIDDEN, HIDDEN), 1),
    "mlp.gate.weight": ((FFN, HIDDEN), 0),
    "mlp.up.weight": ((FFN, HIDDEN), 0),
    "mlp.down.weight": ((HIDDEN, FFN), 1),
    "attention_norm.weight": ((HIDDEN,), None),
    "mlp_norm.weight": ((HIDDEN,), None),
}


def parameters(stage: int, stages: int):
    """Parameters of one pipeline stage: (name, shape, divided by tensor parallelism)."""
    if stage == 0:
        yield "embedding.weight", (VOCABULARY, HIDDEN), 0
    for layer in range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages):
        for name, (shape, tp) in LAYER.items():
            yield f"layers.{layer}.{name}", shape, tp
    if stage == stages - 1:
        yield "norm.weight", (HIDDEN,), None
        yield "output.weight", (VOCABULARY, HIDDEN), 0


def state(stage: int, stages: int, layout_of):
    """Name -> (shape, layout) of weights, both moments and the step counts."""
    found = {}
    for name, shape, tp in parameters(stage, stages):
        layout = layout_of(tp)
        found[f"model/{name}"] = (shape, layout)
        found[f"optimizer/model/{name}/exp_avg"] = (shape, layout)
        found[f"optimizer/model/{name}/exp_avg_sq"] = (shape, layout)
        found[f"optimizer/model/{name}/step"] = ((), None)
    found["values.json"] = ((100_000,), None)
    return found


class Tp8Pp16:
    """Stage p holds the ranks from p * dp * 8 on; in it a mesh (dp, tp)."""

    name = "tp8-pp16"

    def __init__(self, world: int) -> None:
        self.stages = 16 if world >= 256 else 2
        self.dp = world // TP // self.stages
        self.world = world

    def stage_of(self, rank: int) -> int:
        return rank // (self.dp * TP)

    def of_stage(self, stage: int):
        """State of one stage; FSDP divides what tensor parallelism has left of the rows."""
        base = stage * self.dp * TP

        def layout_of(tp):
            order = (1, 0) if tp == 0 else (0, 1)
            return Layout((self.dp, TP), (TP, 1), base, (0, tp), order)

        return state(stage, self.stages, layout_of)


class Fsdp:
    """One mesh over all ranks."""

    name = "fsdp"
    stages = 1

    def __init__(self, world: int) -> None:
        self.world = world

    def stage_of(self, rank: int) -> int:
        del rank
        return 0

    def of_stage(self, stage: int):
        """The whole model; the step counts are equal on all ranks."""
        layout = Layout((self.world,), (1,), 0, (0,), (0,))
        found = state(stage, 1, lambda tp: layout)
        everywhere = replicated(self.world)
        return {n: (s, lay or (everywhere if s == () else None)) for n, (s, lay) in found.items()}


def regions(tensors, rank):
    """What a rank holds."""
    found = []
    for name, (shape, layout) in tensors.items():
        box = layout.box(shape, layout.coordinate(rank)) if layout else whole(shape)
        dtype = "U8" if name == "values.json" else "F32"
        found.append(Region(name, dtype, box.offset, box.shape, shape))
    return found


def entries(tensors):
    return {
        name: TensorEntry("U8" if name == "values.json" else "F32", shape, layout)
        for name, (shape, layout) in tensors.items()
    }


def timed(function):
    """(seconds of CPU time, what it returned): other processes do not count."""
    begun_s = time.process_time()
    result = function()
    return time.process_time() - begun_s, result


def save_side(plan, rank):
    """One rank's plan, header and report: seconds and bytes."""
    tensors = plan.of_stage(plan.stage_of(rank))
    held = regions(tensors, rank)
    layouts = {name: layout for name, (_, layout) in tensors.items() if layout}

    def work():
        planned = plan_save(held, layouts, rank=rank)
        laid_out = shard_file.lay_out(planned)
        header = shard_file.reserve(ShardHeader(rank, plan.world, laid_out))
        return planned, shard_file.build(header)

    seconds, (planned, head) = timed(work)
    receipt = {"file": FileEntry(shard_file_name(rank), len(head), "", D).to_json(), "reached": []}
    report = {"receipt": receipt, "table": D}
    groups = {"groups": {"optimizer over it": ["", plan.world, D]}, "place": [0, 9, 0, 27, 0]}
    sent = len(json.dumps(report)) + len(json.dumps(groups))
    return {
        "save_plan_s": seconds,
        "header_bytes": len(head),
        "sent_bytes": sent,
        "regions": len(planned),
    }


def commit_side(plan):
    """Rank 0 from all reports to the manifest's bytes."""
    tables = {}
    for stage in range(plan.stages):
        data = canonical(table_to_json(entries(plan.of_stage(stage))))
        tables[digest(data)] = data
    names = list(tables)
    reports = [
        json.dumps(
            {
                "receipt": {
                    "file": FileEntry(shard_file_name(r), 2**31 + r, "", D).to_json(),
                    "reached": [],
                },
                "table": names[plan.stage_of(r)],
            }
        )
        for r in range(plan.world)
    ]
    digests = [json.dumps({"optimizer": ["", plan.world, D]}) for _ in range(plan.world)]

    def work():
        equal_groups([json.loads(text) for text in digests])
        told = [json.loads(text) for text in reports]
        files = tuple(FileEntry.from_json(report["receipt"]["file"]) for report in told)
        merged = merge_tables(
            [
                table_from_json(json.loads(tables[name]), plan.world)
                for name in dict.fromkeys(report["table"] for report in told)
            ]
        )
        manifest = Manifest(
            "run", SnapshotName(1, 1, 9, 0), None, Cursor(step=9), plan.world, files, merged, 1.0
        )
        return manifest, manifests.dump(manifest)

    seconds, (manifest, data) = timed(work)
    return seconds, manifest, data


def restore_side(manifest, other, rank):
    """The plan of one rank of another layout."""
    tensors = other.of_stage(other.stage_of(rank))
    wanted = {
        name: layout.box(shape, layout.coordinate(rank)) if layout else None
        for name, (shape, layout) in tensors.items()
        if name in manifest.tensors
    }

    def work():
        planner = Planner(manifest)
        donor = rank % manifest.world
        return plan_restore(manifest, wanted, donor=donor, planner=planner)

    seconds, reads = timed(work)
    return seconds, len(reads)


def measure(kind, world, rounds):
    """One row of the table."""
    plan = kind(world)
    other = (Fsdp if kind is Tp8Pp16 else Tp8Pp16)(world)
    ranks = (0, world // 2 + 3, world - 1)
    rows = {"save_plan_s": [], "commit_s": [], "manifest_load_s": [], "restore_plan_s": []}
    for _ in range(rounds):
        saves = [save_side(plan, rank) for rank in ranks]
        commit_s, manifest, data = commit_side(plan)
        load_s, loaded = timed(lambda data=data: manifests.load(data, "it"))
        restores = [restore_side(loaded, other, rank) for rank in ranks]
        rows["save_plan_s"].append(max(each["save_plan_s"] for each in saves))
        rows["commit_s"].append(commit_s)
        rows["manifest_load_s"].append(load_s)
        rows["restore_plan_s"].append(max(seconds for seconds, _ in restores))
    return {
        "layout": plan.name,
        "into": other.name,
        "ranks": world,
        **{key: statistics.median(values) for key, values in rows.items()},
        "header_bytes": max(each["header_bytes"] for each in saves),
        "sent_bytes": max(each["sent_bytes"] for each in saves),
        "reads": max(number for _, number in restores),
        "manifest_bytes": len(data),
        "tensors": len(manifest.tensors),
    }


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = []
    columns = ("save plan", "commit", "load", "restore plan", "header", "sent", "manifest", "reads")
    print("layout      ranks " + " ".join(f"{column:>12}" for column in columns))
    for kind in (Tp8Pp16, Fsdp):
        for world in WORLDS:
            row = measure(kind, world, arguments.rounds)
            found.append(row)
            cells = (
                f"{row['save_plan_s'] * 1e3:.1f} ms",
                f"{row['commit_s']:.3f} s",
                f"{row['manifest_load_s'] * 1e3:.0f} ms",
                f"{row['restore_plan_s'] * 1e3:.1f} ms",
                f"{row['header_bytes'] / 1e3:.0f} kB",
                f"{row['sent_bytes']} B",
                f"{row['manifest_bytes'] / 1e6:.2f} MB",
                str(row["reads"]),
            )
            print(f"{row['layout']:10} {world:6} " + " ".join(f"{cell:>12}" for cell in cells))
    if arguments.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "rounds": arguments.rounds,
            "rows": found,
        }
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
