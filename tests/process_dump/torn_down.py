"""One of two ranks: process groups taken down and made again under live wrappers, gloo's here.

Trains each layout twice, the second time with its groups taken down between steps, and then asks
for what has to be refused. Prints what it saw as one line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainckpt.dumping.communicators import Communicators
from trainckpt.errors import NoAgreement, SaveFailed
from trainckpt.ranks import process_groups

STEPS, TAKEN_DOWN_AT, WIDTH = 7, (0, 4), 64


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        *[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    )


def ddp(**more):
    return DistributedDataParallel(network(), bucket_cap_mb=0.02, **more)


def ddp_of_a_group():
    """The module alone holds its group, and a SyncBatchNorm another."""
    options = {"timeout": timedelta(seconds=77), "group_desc": "mine"}
    model = ddp(process_group=dist.new_group([0, 1], **options), gradient_as_bucket_view=True)
    model.beside = [nn.SyncBatchNorm(4, process_group=dist.new_group([dist.get_rank()]))]
    return model


def hsdp():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    for at in (0, 2, 4):
        fully_shard(model[at], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tp():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        network(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    return fully_shard(model, mesh=mesh["dp"])


def known():
    """Of every group: all that training could notice."""
    world = dist.distributed_c10d._world
    seen = [
        (
            world.pg_names[g],
            dist.get_process_group_ranks(g),
            dist.get_backend_config(g),
            g.group_desc,
            world.pg_to_tag[g],
            str(process_groups.specs()[n].timeout),
            g.rank(),
            g.size(),
        )
        for n, g in enumerate(world.pg_map)
    ]
    return seen, world.group_count


def order_of_buckets(model):
    if not isinstance(model, DistributedDataParallel):
        return ""
    model._set_ddp_runtime_logging_sample_rate(1)
    model.logger.set_runtime_stats_and_log()
    return model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]


def of_gloo():
    names = [(each / "comm").read_text() for each in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def trained(build, *, taken_down):
    """Losses, weights, buckets; how many threads gloo had while the groups were away."""
    model, losses, threads = build(), [], set()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(2 * step + dist.get_rank())
        loss = model(torch.randn(5, WIDTH, generator=numbers)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if taken_down and step in TAKEN_DOWN_AT:
            before, away = known(), Communicators(lambda step=step: (step, 0))
            if step == 0:  # it looks at every object there is
                away.examine()
            away.tear_down()
            threads.add(of_gloo())
            assert not away.is_whole
            assert not dist.is_initialized()
            away.make()
            away.agree()
            assert known() == before, (known(), before)
            assert functional.broadcast.__defaults__ == (dist.group.WORLD,)
    weights = [
        float(
            p.detach().to_local().double().sum()
            if hasattr(p, "to_local")
            else p.detach().double().sum()
        ).hex()
        for p in model.parameters()
    ]
    return {"losses": losses, "weights": weights, "buckets": order_of_buckets(model)}, threads


def refused():
    try:
        Communicators(lambda: ()).examine()
    except SaveFailed as error:
        return error.message
    return ""


class Holder:
    pass


def refusals():
    """What holds a group beside what is known, one after the other."""
    group = dist.new_group([0, 1])
    yield refused()
    inside = {"a": group}
    del group
    yield refused()
    owner = Holder()
    owner.group = inside.pop("a")
    yield refused()
    later = (lambda group: lambda: group)(owner.__dict__.pop("group"))
    yield refused()
    globals()["kept"] = later()
    del later
    yield refused()
    dist.destroy_process_group(globals().pop("kept"))
    yield refused()  # nobody any more
    model = ddp()
    model.register_comm_hook(None, allreduce_hook)
    yield refused()
    del model
    graph = object.__new__(torch.cuda.CUDAGraph)
    yield refused()
    del graph
    gc.freeze()
    yield refused()
    gc.unfreeze()


def disagreement():
    away = Communicators(lambda: (7, dist.get_rank()))
    try:
        away.agree()
    except NoAgreement as error:
        return error.message


if __name__ == "__main__":
    gc.unfreeze()  # what the warm server has imported
    process_groups.TAKEN_DOWN.add("gloo")
    found = {}
    dist.init_process_group("gloo")
    importlib.reload(functional)  # as when it is imported now: the group is a default argument
    for build in (ddp, ddp_of_a_group, hsdp, tp):
        straight, _ = trained(build, taken_down=False)
        torn, threads = trained(build, taken_down=True)
        found[build.__name__] = {"same": torn == straight, "threads": sorted(threads), **torn}
        gc.collect()
    found["refusals"], found["disagreement"] = list(refusals()), disagreement()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")
