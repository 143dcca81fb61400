"""A training with DeepSpeed's ZeRO, as a script for torchrun: `deepspeed_job.py JSON`.

The model has what partitions can get wrong: a frozen layer, tied weights, two parameter groups, odd
sizes, a buffer of each rank, a layer that no batch uses and one that every other batch uses. Each
rank appends a line for each micro-batch to `OUT.rank<r>.jsonl`, and one with a digest of its own
state at the end.

A fault waits until it is certain: until a save is committed, or all ranks have heard of a notice.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

ITEMS, BATCH, ACCUMULATE, EPOCHS = 48, 2, 3, 2
WITHIN_S = 120.0
KINDS = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2, "overlap_comm": True}},
    "zero1-bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero2-bf16": {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero2-bf16-sums": {
        "zero_optimization": {"stage": 2, "contiguous_gradients": False},
        "bf16": {"enabled": True},
    },
    "zero2-fp16": {  # the first steps overflow, and are skipped
        "zero_optimization": {"stage": 2},
        "fp16": {
            "enabled": True,
            "initial_scale_power": 20,
            "loss_scale_window": 2,
            "hysteresis": 1,
        },
    },
}


def main(config):
    import deepspeed
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler

    import trainckpt

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    random.seed(rank)

    class Noisy(Dataset):
        def __len__(self):
            return ITEMS

        def __getitem__(self, i):
            noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
            return torch.full((4,), i / ITEMS) + 0.1 * noise, i

    engine = make_engine(config["kind"])
    data = Noisy()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    torch.manual_seed(100 + rank)
    np.random.seed(100 + rank)
    path = Path(f"{config['out']}.rank{rank}.jsonl")

    def line(**values):
        with path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    if config.get("own"):
        train_with_its_own_checkpoint(config, engine, loader, line)
        return
    if config.get("without"):  # a step of the restore
        from trainckpt.state.adapters.deepspeed_engine import EngineState

        setattr(EngineState, config["without"], lambda *_: None)
    with trainckpt.Checkpointer(
        config["run"], model=engine, loader=loader, stop_at="micro-batch", every="1000 steps"
    ) as ckpt:
        line(attempt=ckpt.attempt, begun=ckpt.cursor.micro_batches)
        for epoch in ckpt.epochs(EPOCHS):
            for x, ids in ckpt.batches():
                number = ckpt.cursor.micro_batches
                known = {"epoch": epoch, "number": number, "ids": ids.tolist()}
                before = of_parameters(engine) if ckpt.cursor.micro == 0 else None
                loss = train(engine, x)
                line(**known, before=before, **told(engine, loss))
                fault(config, ckpt, rank, number)
    line(end=of_rank(engine), random=[random.random(), float(torch.rand(()))])


def make_engine(kind, **config):
    import deepspeed
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(4, 7).requires_grad_(False)
            self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
            self.second.weight = self.first.weight
            self.drop = nn.Dropout(0.2)
            self.register_buffer("mean", torch.zeros(()))  # another one on each rank
            self.unused, self.sometimes = nn.Linear(3, 3), nn.Linear(7, 7)
            self.out = nn.Linear(7, 1, bias=False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            x = self.drop(self.first(self.frozen(x)))
            self.mean.lerp_(x.detach().float().mean(), 0.1)
            x = x - self.mean.to(x.dtype)
            self.calls += 1
            if int(self.calls) % 2:
                x = x + self.sometimes(x)
            return self.out(self.second(x))

    if "fp16" in KINDS.get(kind, {}):  # torch computes in it, slowly; DeepSpeed says no
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    net = Net()
    parameters = list(net.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 0.003},
    ]
    warm_up = {"warmup_num_steps": 6, "warmup_max_lr": 0.02}
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=groups,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": ACCUMULATE,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": warm_up},
            **KINDS.get(kind, {}),
            **config,
        },
    )
    return engine


def train(engine, x):
    loss = engine(x.to(engine.module.out.weight.dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss


def told(engine, loss):
    norm = engine.get_global_grad_norm()
    return {
        "loss": loss.item().hex(),
        "norm": None if norm is None else float(norm).hex(),
        "lr": [rate.hex() for rate in engine.get_lr()],
        "steps": [engine.global_steps, engine.skipped_steps],
        "scale": float(getattr(engine.optimizer, "cur_scale", 1)),
    }


def of_parameters(engine):
    """A digest of weights, fp32 weights and moments, parameter by parameter, on any ranks.

    DeepSpeed's `safe_get_full_optimizer_state` fails for all parameter groups but the first.
    """
    found = [p.detach().float() for p in engine.module.parameters()]
    inner = engine.optimizer.optimizer
    for group, parameters in zip(inner.param_groups, of_groups(engine), strict=True):
        flat = group["params"][0]
        state = inner.state.get(flat, {})
        for part in (flat, *(state[key] for key in ("exp_avg", "exp_avg_sq") if key in state)):
            sizes = [p.numel() for p in parameters]
            found += whole(part)[: sum(sizes)].split(sizes)
    return digest(found)


def of_groups(engine):
    groups = getattr(engine.optimizer, "bit16_groups", None)
    return engine.optimizer.bf16_groups if groups is None else groups


def whole(part):
    """The parts of all ranks; zeros may follow."""
    import torch

    parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, part.detach())
    return torch.cat(parts)


def of_rank(engine):
    """A digest of this rank's part of everything."""
    inner, found = engine.optimizer.optimizer, [*engine.module.parameters()]
    found += engine.module.buffers()
    for group in inner.param_groups:
        flat = group["params"][0]
        found += [flat, *(inner.state[flat][key] for key in sorted(inner.state[flat]))]
    return digest(found)


def digest(tensors):
    import torch

    seen = hashlib.sha256()
    for tensor in tensors:
        seen.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return seen.hexdigest()


def fault(config, ckpt, rank, number):
    """End the first attempt, so that the next one begins in micro-batch `at`."""
    at = config.get("at")
    if at is None or ckpt.attempt != 1:
        return
    if config["fault"] == "SIGTERM" and number == at - 1:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        until(ckpt._gate.has_open_round)
    if config["fault"] == "SIGKILL" and number == at - 1:
        ckpt.save()  # taken at the boundary before micro-batch `at`, inside a window
    if config["fault"] == "SIGKILL" and number == at and rank == 1:
        until(lambda: ckpt._attempt.saver.committed[1].micro_batches == at)
        os.kill(os.getpid(), signal.SIGKILL)


def until(condition):
    """Poll: a signal does not say when all ranks know of it."""
    ends_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < ends_s, "waited in vain"
        time.sleep(0.02)


def train_with_its_own_checkpoint(config, engine, loader, line):
    """As its documentation shows: the data loader is advanced to where the checkpoint was made."""
    at, number = config.get("at"), 0
    _, state = engine.load_checkpoint(config["run"])
    begun = state["number"] if state else 0
    line(begun=begun)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, ids in loader:
            if number >= begun:
                loss = train(engine, x)
                line(epoch=epoch, number=number, ids=ids.tolist(), **told(engine, loss))
            number += 1
            if number == at:
                engine.save_checkpoint(config["run"], client_state={"number": number})
                return
    line(end=of_rank(engine))


def refusals():
    """Print what a Checkpointer says of each engine that it refuses."""
    import deepspeed
    import torch
    from torch import nn

    import trainckpt

    deepspeed.init_distributed("gloo")
    found = {}

    def refused(name, make):
        try:
            make()
        except trainckpt.ConfigurationError as error:
            found[name] = [error.message, error.hint]

    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engines = {
        "no zero": make_engine("", zero_optimization={"stage": 0}),
        "zero 3": make_engine("", zero_optimization={"stage": 3}),
        "offload": make_engine("", zero_optimization=offload, zero_force_ds_cpu_optimizer=False),
    }
    for name, engine in engines.items():
        refused(name, lambda engine=engine: trainckpt.Checkpointer("never", model=engine))

    class FusedAdam(torch.optim.AdamW):  # by its name; to compile DeepSpeed's takes minutes
        pass

    engine = make_engine("zero2")
    engine.optimizer.optimizer.__class__ = FusedAdam
    refused("kernel", lambda: trainckpt.Checkpointer("never", model=engine))
    engine.optimizer.optimizer.__class__ = torch.optim.AdamW
    both = {"model": engine, "optimizer": engine.optimizer}
    refused("its optimizer", lambda: trainckpt.Checkpointer("never", **both))
    inner = {"optimizer": engine.optimizer.optimizer, "model": engine}
    refused("the optimizer inside", lambda: trainckpt.Checkpointer("never", **inner))
    refused("inside", lambda: trainckpt.Checkpointer("never", model=nn.Sequential(engine)))
    torch.manual_seed(1)
    with trainckpt.Checkpointer("run", model=make_engine("zero2")):
        pass
    refused("load", lambda: trainckpt.load("run", into=engine))
    begun = make_engine("zero2-bf16", bf16={"enabled": False}, data_types={})
    with torch.no_grad():
        begun.module.out.weight.zero_()
    with trainckpt.Checkpointer("second", model=begun, init_from="run"):
        found["first weights"] = of_parameters(begun) == of_parameters(engine)
    print("REFUSED " + json.dumps(found), flush=True)


if __name__ == "__main__":
    refusals() if sys.argv[1] == "refusals" else main(json.loads(sys.argv[1]))
