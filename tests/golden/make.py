"""Makes the golden snapshots of a version of the format; run once when the version changes.

    python -m tests.golden.make 2
    python -m tests.golden.make 3    # the same, half of it in files of an older snapshot
    python -m tests.golden.make 4    # the same, encrypted
    python -m tests.golden.make 5    # as 3, with no digests of whole files

Two runs in `tests/golden/v<version>`: `one`, of a single process, with a tensor of every type the
format knows; `two`, of two ranks, with a matrix that is cut between them. `digests.json` says
what must be read from them, for ever.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tests.state.helpers import registry
from trainckpt.encryption import encrypted_file
from trainckpt.encryption import keys as encryption_keys
from trainckpt.encryption.keys import Identity, write_identity
from trainckpt.format import names
from trainckpt.format.cursor import Cursor
from trainckpt.format.digest import digest
from trainckpt.format.manifest import Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.decrypting_tier import DecryptingTier, KeyRing
from trainckpt.snapshot.encrypted_writer import SnapshotKey
from trainckpt.snapshot.prune import prune
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.save_plan import equal_groups, plan_save
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.state import staging, tensor_digests
from trainckpt.state.capture import capture
from trainckpt.state.captured import VALUES, parse_values
from trainckpt.state.destination import Destination
from trainckpt.storage.local import LocalTier

HERE = Path(__file__).parent
TYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
]


class Own:
    """Values of every kind that JSON has no word for."""

    def state_dict(self):
        """As a script's own object would give it."""
        return {
            "numbers": [1, 2**70, 0.1, float("inf"), float("nan"), -0.0, 1j, True, None],
            3: ("tuple", {4, 5}, frozenset({6}), b"bytes", torch.Size([1, 2])),
            "types": [torch.bfloat16, torch.device("cpu")],
            "tensor": torch.arange(3),
            "sparse": torch.eye(2).to_sparse(),
        }

    def load_state_dict(self, state):
        """Never called here."""


def objects(rank):
    """What is saved: a model with its optimizer in mid-window, and values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 40))
    table = torch.arange(600.0).view(100, 6)
    model.register_parameter("table", nn.Parameter(table, requires_grad=False))
    for name in TYPES:
        model.register_buffer(f"as_{name}", torch.arange(-2, 3).to(getattr(torch, name)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    model[1].running_mean += rank
    torch.manual_seed(rank)
    return registry(model=model, optimizer=optimizer, own=Own())


READER = Identity.of(bytes(range(32)))


def write(place, world, version):
    """Save by `world` ranks, one after the other; returns the committed manifest."""
    tier = LocalTier(place)
    tier.create("run.json", b'{"format":1,"id":"golden"}')
    if version < names.WITH_REFERENCES:
        return save(tier, world, SnapshotName(1, 1, 2, 1), version)
    older = save(tier, world, SnapshotName(1, 1, 1, 0), version)
    manifest = save(tier, world, SnapshotName(1, 2, 2, 1), version, older)
    kept = {file.name for file in manifest.reached}
    prune(tier, [older.name], kept)
    return manifest


def save(tier, world, name, version, older=None):
    """One snapshot; what a rank has stored in `older` under every second key is referred to."""
    is_sealed = version == names.ENCRYPTED
    seal = SnapshotKey("golden", bytes([name.sequence] * 32)) if is_sealed else None
    captured = [capture(objects(rank)) for rank in range(world)]
    equal = equal_groups(
        [tensor_digests.group_digests(c, r, world) for r, c in enumerate(captured)]
    )
    files, tensors, reached = [], {}, []
    for rank, one in enumerate(captured):
        layouts = tensor_digests.split_layouts(one, equal, world)
        regions = staging.describe(one, layouts)
        planned = plan_save(regions, layouts, rank=rank)
        references = {}
        if older is not None:
            file = f"{older.name}/{older.files[rank].name}"
            references = {region.key: file for region in planned[::2]}
            reached.append(replace(older.files[rank], name=file))
        planned = [region for region in planned if region.key not in references]
        shard = staging.stage(one, planned, rank=rank, world=world, references=references)
        file = write_shard(tier, name, rank, shard, snapshot_key=seal)
        if version < names.ENCRYPTED:
            file = replace(file, digest=digest(shard.memory))
        files.append(file)
        for r in regions:
            layout = layouts.get(r.tensor)
            tensors[r.tensor] = TensorEntry(r.dtype, r.of, layout)
    cursor = Cursor(epoch=0, step=2, micro=1, batches=3, micro_batches=3, samples=12)
    manifest = Manifest(
        "golden",
        name,
        None,
        cursor,
        world,
        tuple(files),
        tensors,
        1.5,
        tags=("golden",),
        reason="make",
        fingerprint={"torch": "any"},
        reached=tuple(reached),
    )
    if seal is not None:
        keys = dict(older.encryption.keys) if older is not None else {}
        wrapped = encryption_keys.wrap_for_all(seal.key, [READER.recipient], "golden", str(name))
        manifest = encrypted_file.encrypt_manifest(manifest, seal.key, {**keys, str(name): wrapped})
    commit(tier, manifest)
    return manifest


def reading(tier, manifest):
    """The tier and the manifest as whoever has the identity reads them."""
    opened = DecryptingTier(tier, KeyRing(str(HERE / "v4" / "identity")))
    return opened, opened.admit(manifest)


def digests_of(tier, manifest, rank):
    """Digest of each tensor that `rank` reads; the values as they are, but for the generators."""
    destination = Destination(dict.fromkeys(manifest.tensors))
    Reader(*reading(tier, manifest)).read(dict.fromkeys(manifest.tensors), destination, donor=rank)
    read = destination.finish({})
    values = parse_values(read.pop(VALUES))
    tensors = {name: staging.tensor_digest(tensor) for name, tensor in sorted(read.items())}
    return {"tensors": tensors, "own": values["own"], "ddp": values["ddp"]}


def main(version):
    """Write both runs and what must be read from them."""
    folder = HERE / f"v{version}"
    shutil.rmtree(folder, ignore_errors=True)
    if version == names.ENCRYPTED:
        folder.mkdir()
        write_identity(folder / "identity", READER)
    expected = {}
    stage_threshold(1 << 6)
    for name, world in (("one", 1), ("two", 2)):
        manifest = write(folder / name, world, version)
        tier = LocalTier(folder / name)
        expected[name] = [digests_of(tier, manifest, rank) for rank in range(world)]
    text = json.dumps(expected, indent=1, sort_keys=True)
    (folder / "digests.json").write_text(text + "\n", encoding="utf-8")


def stage_threshold(num_bytes):
    """Cut small tensors too, so that the two-rank run stays small."""
    from trainckpt.format import layout

    layout.UNCUT_BYTES = num_bytes


if __name__ == "__main__":
    main(int(sys.argv[1]))
