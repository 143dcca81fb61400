"""A training under Ray Train, as a driver script: `python -m tests.integrations.ray_job JSON`.

Every worker appends a line for each micro-batch to `traces/<trial>/rank<r>.jsonl`, and the driver
prints one JSON document on its last line. The faults wait for a place in those traces, so nothing
depends on the time that Ray takes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

ITEMS, BATCH, ACCUMULATE, EPOCHS = 48, 2, 3, 2
STORE_BYTES = 80_000_000


# ---- in the workers


def train(config):
    """Train with trainckpt, or with Ray's own checkpoints."""
    import torch

    training = build(config)
    (by_ray if config.get("own_checkpoints") else by_trainckpt)(config, training)
    state = [p.detach().double().sum().item().hex() for p in training.model.parameters()]
    training.line(end=True, weights=state, random=[random.random(), float(torch.rand(()))])


def build(config):
    """Return the objects of a training, and `line`, which appends to the worker's trace."""
    import numpy as np
    import ray.train
    import ray.train.torch
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler

    class Noisy(Dataset):
        def __len__(self):
            return ITEMS

        def __getitem__(self, i):
            noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
            return torch.full((4,), i / ITEMS) + 0.1 * noise, i

    rank = ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    order = {"shuffle": True}
    if config.get("own_sampler"):  # with one worker, Ray adds none
        world = ray.train.get_context().get_world_size()
        order = {"sampler": DistributedSampler(Noisy(), num_replicas=world, rank=rank)}
    loader = ray.train.torch.prepare_data_loader(DataLoader(Noisy(), BATCH, **order))
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    np.random.seed(100 + rank)

    trace = Path(config["traces"])
    trace.mkdir(parents=True, exist_ok=True)
    path = trace / f"rank{rank}.jsonl"

    def line(**values):
        with path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    return SimpleNamespace(
        rank=rank,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        line=line,
    )


def micro_batch(training, x, *, steps):
    """Train a micro-batch, and step if it ends a window; return its loss."""
    loss = training.model(x).square().mean()
    (loss / ACCUMULATE).backward()
    if steps:
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
    return loss.item()


def by_trainckpt(config, training):
    import trainckpt.ray

    with trainckpt.ray.Checkpointer(
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        loader=training.loader,
        stop_at="micro-batch",
        every=config["every"],
        **config.get("options", {}),
    ) as ckpt:
        begun = ckpt.cursor.micro_batches
        training.line(attempt=ckpt.attempt, begun=begun, pid=os.getpid(), node=node_id())
        for epoch in ckpt.epochs(EPOCHS):
            for x, ids in ckpt.batches():
                number = ckpt.cursor.micro_batches
                steps = (ckpt.cursor.micro + 1) % ACCUMULATE == 0
                loss = micro_batch(training, x, steps=steps)
                training.line(number=number, ids=ids.tolist(), loss=loss.hex())
                fault(config, ckpt, training.rank, number)
            if config.get("reports"):
                ckpt.report({"loss": loss, "epoch": epoch})


def by_ray(config, training):
    """Report a checkpoint of all state_dicts at each step; advance the loader after a restart."""
    import ray.train
    import torch
    from ray.train import Checkpoint

    parts = {name: getattr(training, name) for name in ("model", "optimizer", "scheduler")}
    begun, kept = 0, ray.train.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        begun = saved["number"]
    training.line(begun=begun)
    numbers = itertools.count()
    for epoch in range(EPOCHS):
        training.loader.sampler.set_epoch(epoch)
        for x, ids in training.loader:
            number = next(numbers)
            if number < begun:
                continue
            steps = (number + 1) % ACCUMULATE == 0
            loss = micro_batch(training, x, steps=steps)
            training.line(number=number, ids=ids.tolist(), loss=loss.hex())
            if kept is None and number == config["at"] and training.rank == config["rank"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if steps:
                with tempfile.TemporaryDirectory() as folder:
                    checkpoint = None
                    if training.rank == 0:
                        state = {name: part.state_dict() for name, part in parts.items()}
                        torch.save({**state, "number": number + 1}, Path(folder, "state.pt"))
                        checkpoint = Checkpoint.from_directory(folder)
                    ray.train.report({"loss": loss}, checkpoint=checkpoint)


def node_id():
    import ray

    return ray.get_runtime_context().get_node_id()


def fault(config, ckpt, rank, number):
    """Kill this worker; or wait until all ranks have heard of the drain or the request to stop."""
    if ckpt.attempt != 1 or number != config.get("at"):
        return
    if config["fault"] == "kill":
        if rank == config["rank"]:
            at_step = number // ACCUMULATE * ACCUMULATE  # else the kill may come before its commit
            until(lambda: ckpt._attempt.saver.committed[1].micro_batches == at_step)
            os.kill(os.getpid(), signal.SIGKILL)
        return
    if config["fault"] == "drain":
        Path(config["traces"], f"reached{rank}").touch()
    if config["fault"] == "pause" and rank == 0:
        notices = Path(config["storage"], config["name"], "trainckpt", "notices")
        notices.mkdir(mode=0o700, exist_ok=True)
        (notices / "1-test.json").write_text(json.dumps({"reason": "trainckpt pause"}))
    until(ckpt._gate.has_open_round)


def until(condition, within_s=120.0):
    """Poll: neither Ray nor a file says when it changes."""
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s, "waited in vain"
        time.sleep(0.05)


# ---- the driver


def main(config):
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1")
    os.environ.update(RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S="0.5")
    import ray

    cluster = None
    if nodes := config.get("nodes"):
        from ray.cluster_utils import Cluster

        sizes = {"object_store_memory": STORE_BYTES}
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, **sizes},
        )
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, resources={"place": 1}, **sizes)
        ray.init(address=cluster.address, log_to_driver=True)
    else:
        ray.init(include_dashboard=False, num_cpus=4, object_store_memory=STORE_BYTES)
    try:
        print(json.dumps(tune(config) if config.get("tuner") else fit(config)), flush=True)
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


def fit(config):
    if config.get("fault") == "drain":
        threading.Thread(target=drain, args=[config], daemon=True).start()
    results, threads = {}, []

    def one(name):
        results[name] = one_fit(config, name)

    for name in config["names"]:
        threads.append(threading.Thread(target=one, args=[name]))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return results


def one_fit(config, name):
    import ray.train

    from trainckpt.ray import snapshot_of

    try:
        result = trainer_of(config, name).fit()
    except ray.train.TrainingFailedError as error:
        return {"error": str(error)[-2000:]}
    kept = [checkpoint.path for checkpoint, _ in result.best_checkpoints or []]
    by_ray = config.get("own_checkpoints")
    named = snapshot_of(result.checkpoint) if result.checkpoint and not by_ray else None
    return {"metrics": result.metrics, "checkpoints": kept, "named": named}


def trainer_of(config, name, callbacks=()):
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    own = {**config, "name": name, "traces": str(Path(config["traces"], name))}
    resources = {"CPU": 0.5, **({"place": 1} if config.get("nodes") else {})}
    number = config.get("num_workers", 2)
    return TorchTrainer(
        train,
        train_loop_config=own,
        torch_config=TorchConfig("gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=tuple(number) if isinstance(number, list) else number,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=config["storage"],
            callbacks=list(callbacks),
            failure_config=ray.train.FailureConfig(max_failures=config.get("max_failures", 0)),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.get("num_to_keep")),
        ),
    )


def trial(config):
    """One trial of a Tuner: a driver of its own."""
    from ray.tune.integration.ray_train import TuneReportCallback

    trainer_of(config["job"], config["name"], [TuneReportCallback()]).fit()


def tune(config):
    """All trials at once, by a Tuner."""
    from ray import tune

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.5}),
        param_space={"name": tune.grid_search(config["names"]), "job": config},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="tuned", storage_path=config["storage"]),
    )
    found = tuner.fit()
    results = {result.config["name"]: {"metrics": result.metrics} for result in found}
    best = found.get_best_result()
    return {**results, "best": {"metrics": best.metrics, "name": best.config["name"]}}


def drain(config):
    """Drain the node of one rank, once both have reached the place of the fault."""
    import ray
    from ray._raylet import GcsClient

    traces = Path(config["traces"], config["names"][0])
    until(lambda: all((traces / f"reached{rank}").exists() for rank in range(2)))
    first = json.loads((traces / f"rank{config['rank']}.jsonl").read_text().splitlines()[0])
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = int((time.time() + config.get("grace", 20.0)) * 1000)
    accepted, why = client.drain_node(first["node"], 2, "spot", deadline_ms)
    (traces / "drained").write_text(json.dumps([accepted, why, time.time(), deadline_ms]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
