"""Programs of real ranks: models whose columns are cut, resumed from snapshots of other layouts."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.faults.test_bad_bytes import flip
from trainckpt import Checkpointer
from trainckpt.errors import TrainckptError
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import catalog
from trainckpt.snapshot.attempt_history import run_id
from trainckpt.snapshot.restore import read_header
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE

WIDE, ODD = 600, 701
COLUMNS = {"1.weight": Shard(1), "0.weight": Shard(0), "0.bias": Shard(0)}
ROWS = dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), Shard(0))


def plain():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, ODD), nn.Linear(ODD, WIDE))


def divided(model, mesh, *ways):
    """The model with every parameter divided over the mesh: a way for each mesh dimension."""
    for name, parameter in list(model.named_parameters()):
        module, _, attribute = name.rpartition(".")
        placements = [way.get(name, Replicate()) for way in ways]
        cut = distribute_tensor(parameter.detach(), mesh, placements)
        setattr(model.get_submodule(module), attribute, nn.Parameter(cut))
    return model


def state(model, optimizer):
    """Digest of every whole parameter and moment."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        for what, tensor in {"": parameter, **optimizer.state[parameter]}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name, what] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    return found


def train(place, model, called="model"):
    """Two steps on made-up gradients, equal on all ranks, each saved; the state after each."""
    optimizer, states = torch.optim.AdamW(model.parameters(), 0.01), []
    tracked = {called: model, f"{called} optimizer": optimizer}
    with Checkpointer(place, every="1 step", keep_last=9, **tracked) as ckpt:
        for step in range(2):
            ckpt.boundary()
            ckpt._attempt.saver.wait()  # while a save is on its way, another may be skipped
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                whole = torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    whole = distribute_tensor(whole, mesh, placements)
                parameter.grad = whole
            optimizer.step()
            optimizer.zero_grad()
            states.append(state(model, optimizer))
    return states


def save(rank, folder):
    """By two ranks: FSDP's layout, DDP's, and tensor parallelism's of other columns."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "fsdp": train(f"{folder}/fsdp", divided(plain(), mesh, ROWS)),
        "ddp": train(f"{folder}/ddp", DistributedDataParallel(plain())),
        "tp": train(f"{folder}/tp", divided(plain(), mesh, COLUMNS)),
    }


def resume(place, model, called="model"):
    """The step, and the state."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    tracked = {called: model, f"{called} optimizer": optimizer}
    with Checkpointer(place, every="never", **tracked) as ckpt:
        return ckpt.resumed_from.step, state(model, optimizer)


def damage(place, name, tensor, of_rank=0):
    """Flip a bit in the middle of the first region of a tensor in a snapshot."""
    tier = LocalTier(place)
    manifest = catalog.load_manifest(tier, run_id(tier), SnapshotName.parse(name))
    for file in manifest.files[of_rank:]:
        header = read_header(tier, manifest.name.folder, file)
        for region in header.regions:
            if region.tensor == tensor:
                at = header.header_bytes + region.first_byte + region.num_bytes // 2
                return flip(tier.root / manifest.name.folder / file.name, at)
    raise AssertionError(tensor)


def resume_in_columns(rank, folder):
    """Four ranks: every case in turn, in this one process a rank; nothing is had from memory."""
    os.environ[ROOT_VARIABLE] = NONE
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    results = {}
    for kind in ("ddp", "tp"):
        results[f"tp from {kind}"] = resume(f"{folder}/{kind}", divided(plain(), line, COLUMNS))
    model = divided(plain(), square, ROWS, COLUMNS)
    results["tp x fsdp from fsdp"] = resume(f"{folder}/fsdp", model)
    results["tp from fsdp"] = resume(f"{folder}/fsdp", divided(plain(), line, COLUMNS))
    results["rows"] = resume(f"{folder}/fsdp", divided(plain(), line, ROWS))
    results["pipeline"] = pipeline(rank, f"{folder}/pipeline")
    return results


def pipeline(rank, place):
    """Two stages of two ranks; only the first one's ranks hold columns."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    stage = rank // 2

    def model(*ways):
        half = nn.Sequential(*(m if i == stage else nn.Identity() for i, m in enumerate(plain())))
        return divided(half, meshes[stage], *ways)

    states = train(place, model(ROWS), f"stage {stage}")
    ways = {"0.weight": Shard(1)}, {}
    step, found = resume(place, model(ways[stage]), f"stage {stage}")
    return step, found == states[-1]


def resume_damaged(rank, folder):
    """Three ranks: a block that all read is damaged; then there is nothing older."""
    mesh = init_device_mesh("cpu", (3,))
    if rank == 0:
        damage(f"{folder}/ddp", "s2~1.2", "model/1.weight")
        damage(f"{folder}/tp", "s2~1.2", "values.json", of_rank=1)  # one rank reads that, alone
        damage(f"{folder}/tp", "s1~1.1", "model/1.weight")
    torch.distributed.barrier()
    step, found = resume(f"{folder}/ddp", divided(plain(), mesh, COLUMNS))
    try:
        resume(f"{folder}/tp", divided(plain(), mesh, COLUMNS))
    except TrainckptError as error:
        return step, found, type(error).__name__, error.message
    return None
