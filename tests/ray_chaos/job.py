"""A training under Ray Train, as a driver script: `python -m tests.ray_chaos.job JSON`.

Each worker of each attempt writes TRACE/<attempt>.<rank>, as `tests.elastic.trace` reads it, and
counts micro-batches as its steps. While there is a file TRACE/slowly, they train slowly.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

PACE_S, SLOW_PACE_S = 0.01, 0.25  # a micro-batch, so that events find workers that train
ACCUMULATE = 2
COLLECTIVE_S = 60  # a worker that waits so long for another fails
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "8",  # a frozen worker is given up
    "RAY_DEDUP_LOGS": "0",
}
RESIZE_S = 4.0


def train(config):
    import ray
    import ray.train
    import ray.train.torch
    import torch
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler

    import trainckpt

    class Numbers(Dataset):
        """Samples that show their number, with noise from the generator of whoever loads them."""

        def __len__(self):
            return config["samples"]

        def __getitem__(self, number):
            return number, torch.full([4], number / config["samples"]) + 0.1 * torch.randn(4)

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    order = {"shuffle": True}
    if not config["prepared"]:
        sampler = DistributedSampler(Numbers(), num_replicas=world, rank=rank, seed=1)
        order = {"sampler": sampler}
    loader = ray.train.torch.prepare_data_loader(DataLoader(Numbers(), 1, **order))
    torch.manual_seed(100 + rank)
    trace = Path(config["trace"])
    with trainckpt.ray.Checkpointer(
        model=model,
        optimizer=optimizer,
        loader=loader,
        stop_at="micro-batch",
        every=config["every"],
    ) as ckpt:
        begins = {
            "world": world,
            "restarts": 0,
            "step": ckpt.cursor.micro_batches,
            "node": ray.get_runtime_context().get_node_id(),
        }
        with (trace / f"{ckpt.attempt}.{rank}").open("a") as file:
            print(json.dumps(begins), file=file, flush=True)
            for epoch in ckpt.epochs(config["epochs"]):
                for numbers, x in ckpt.batches():
                    step = ckpt.cursor.micro_batches
                    loss = (model(x) - 1).square().mean()
                    (loss / ACCUMULATE).backward()
                    if (ckpt.cursor.micro + 1) % ACCUMULATE == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    line = [step, epoch, numbers.item(), loss.item().hex()]
                    print(json.dumps(line), file=file, flush=True)
                    time.sleep(SLOW_PACE_S if (trace / "slowly").exists() else PACE_S)


def main(config):
    os.environ.update(VARIABLES)
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address=config["address"])
    try:
        number = config["workers"]
        TorchTrainer(
            train,
            train_loop_config=config,
            torch_config=TorchConfig("gloo", timeout_s=COLLECTIVE_S),
            scaling_config=ray.train.ScalingConfig(
                num_workers=tuple(number) if isinstance(number, list) else number,
                resources_per_worker={"CPU": 1, "place": 1},
                elastic_resize_monitor_interval_s=RESIZE_S,
            ),
            run_config=ray.train.RunConfig(
                name=config["name"],
                storage_path=config["storage"],
                failure_config=ray.train.FailureConfig(max_failures=config["max_failures"]),
            ),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
