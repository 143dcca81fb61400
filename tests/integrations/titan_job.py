"""A training under torchtitan on CPUs: `torchrun -m tests.integrations.titan_job ...`.

The arguments are those of `torchtitan.train`, and this module is their `--module`. Every rank
appends a line for each micro-batch to `$TITAN_TRACE/rank<r>.jsonl`. Faults wait for a place in
those traces.

torchtitan 0.3.0 trains on GPUs with a newer torch. `use_cpu` is what it lacks on a CPU.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

LETTERS = "abcdefghijklmnopqrstuvwxyz "
DOCUMENTS, SEQ_LEN, STEPS = 40, 16, 6


# ---- torchtitan on CPUs


def use_cpu():
    """Let torchtitan train on CPUs, with gloo."""
    from torchtitan.tools import utils

    nothing = lambda *_, **__: None  # noqa: E731
    module = SimpleNamespace(
        set_device=nothing,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=nothing,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
        memory_stats=lambda *_: {},
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 30),
    )
    utils.device_type, utils.device_module = "cpu", module
    utils.get_device_info = lambda: ("cpu", module)
    utils.get_local_device = lambda: torch.device("cpu")
    if not hasattr(dist, "set_timeout"):  # torch 2.13
        dist.set_timeout = nothing
    fakes = [] if find_spec("triton") else ["triton", "triton.language"]  # imported, and not used
    import_module("torch._inductor.compile_fx")  # it would use them
    sys.modules.update({name: MagicMock() for name in fakes})
    import_module("torchtitan.trainer")
    for name in fakes:
        del sys.modules[name]
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)
    from torchtitan.distributed import fsdp

    shard = fsdp.fully_shard

    def fully_shard(*args, **kwargs):
        sharded = shard(*args, **kwargs)
        for part in sharded if isinstance(sharded, list) else [sharded]:
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        return sharded

    fsdp.fully_shard = fully_shard


# ---- a small job


def make_assets(folder):
    """Write a tokenizer of letters, and a data set of texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    draw = random.Random(1)
    texts = ["".join(draw.choices(LETTERS, k=draw.randrange(20, 90))) for _ in range(DOCUMENTS)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "texts.jsonl").write_text("".join(lines))


def _texts(path):
    from datasets import Dataset

    lines = Path(path).read_text().splitlines()
    return Dataset.from_list([json.loads(line) for line in lines])


def small():
    """Return the configuration of the job, by torchtitan's name for such a function."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.validate import Validator
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    text_datasets.DATASETS["letters"] = DatasetConfig(
        path=os.environ["TITAN_ASSETS"] + "/texts.jsonl",
        loader=_texts,
        sample_processor=lambda sample: sample["text"],
    )
    spec = llama3.model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    data = text_datasets.HuggingFaceTextDataLoader.Config(dataset="letters")
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(),
        hf_assets_path=os.environ["TITAN_ASSETS"],
        dump_folder="outputs",
        model_spec=spec,
        optimizer=default_adamw(lr=1e-3, implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=12,
            seq_len=SEQ_LEN,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
            gc_freq=1000,
        ),
        dataloader=data,
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        validator=Validator.Config(freq=2, steps=2, dataloader=replace(data)),
    )


# ---- traces


def trace(folder, fault):
    """Record each micro-batch; some of its tokens are dropped at random."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    rank = int(os.environ["RANK"])
    random.seed(100 + rank)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.jsonl"
    body, last = Trainer._forward_backward_body, [0, 0]

    def traced(self, inputs, labels, *args):
        ckpt = getattr(self.checkpointer, "checkpointer", None)
        last[:] = [self.step, last[1] + 1 if last[0] == self.step else 0]
        micro = last[1] if ckpt is None else ckpt.cursor.micro
        kept = (torch.rand(inputs.shape) < 0.9) & (random.random() < 0.9)
        loss = body(self, torch.where(kept, inputs, 0), labels, *args)
        number = (self.step - 1) * self.gradient_accumulation_steps + micro
        seen = self.ntokens_seen
        line = {"number": number, "tokens": inputs.tolist(), "loss": loss.item().hex()}
        with path.open("a") as file:
            file.write(json.dumps({**line, "seen": seen}) + "\n")
        struck = folder / f"struck{rank}"
        if number == fault.get("at") and not struck.exists():
            struck.touch()
            strike(ckpt, fault, rank)
        return loss

    Trainer._forward_backward_body = traced
    log = MetricsProcessor.log

    def logged(self, step, loss, most, norm, **more):
        line = {"step": step, "loss": loss.hex(), "max": most.hex(), "norm": norm.hex()}
        with (folder / f"metrics{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return log(self, step, loss, most, norm, **more)

    MetricsProcessor.log = logged


def strike(ckpt, fault, rank):
    """Send the signal, and hold each rank until it works; SIGKILL waits for the last save."""
    number = getattr(signal, fault["signal"])
    if ckpt is not None and number == signal.SIGKILL:
        begun = ckpt.cursor.micro_batches - ckpt.cursor.micro
        until(lambda: ckpt._attempt.saver.committed[1].micro_batches == begun)
    if rank == fault["rank"]:
        os.kill(os.getpid(), number)
    elif number == signal.SIGKILL:
        return
    until(ckpt._gate.has_open_round)


def until(condition, within_s=60.0):
    """Poll: nobody says when it changes."""
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s, "waited in vain"
        time.sleep(0.02)


if __name__ == "__main__":
    use_cpu()
    trace(Path(os.environ["TITAN_TRACE"]), json.loads(os.environ.get("TITAN_FAULT", "{}")))
    from torchtitan.train import main

    main()
