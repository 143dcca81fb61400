"""Accelerate: attached, a run trains what it trains without us, and a stop anywhere is exact."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import trainckpt
from tests.integrations import accelerate_training
from tests.integrations.accelerate_training import Training, compared, fresh, plain, tracked
from tests.ranks.processes import preload, run_ranks
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.integrations import accelerate_attach

preload("tests.integrations.accelerate_training")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "stops", [[0, 4, 6, 11, 33], pytest.param([3, 12, 21, 32], marks=pytest.mark.long)], ids=str
)
def test_a_stop_at_any_place_of_window_and_epoch_ends_as_the_run_without_us(tmp_path, stops):
    """11 micro-batches an epoch, windows of 4, 4 and 3; losses, samples, phase, state, RNG."""
    assert compared(tmp_path, stops) == []


@pytest.mark.parametrize(
    "how",
    [
        {"use_seedable_sampler": True},
        {"own": {"drop_last": True}, "items": 23},
        {"accumulate": 1, "split_batches": True, "non_blocking": True},
        {"mixed": "bf16", "windows": {"sync_with_dataloader": False}},
        {"workers": 2, "items": 12},
        {"workers": 2, "items": 12, "own": {"persistent_workers": True}},
    ],
    ids=["seedable", "drop last", "split", "bf16", "workers", "persistent workers"],
)
@pytest.mark.parametrize("stop", [pytest.param(3, marks=pytest.mark.long), 8])
def test_every_kind_of_loader_goes_on_where_it_was(tmp_path, stop, how):
    assert compared(tmp_path, [stop], **how) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_is_told_the_epoch_is_told_before_anything_is_fetched_again(
    tmp_path, workers
):
    """In the middle of the second epoch; workers get a copy of the dataset as they start."""
    how = {"kind": accelerate_training.Harder, "workers": workers, "items": 10}
    assert compared(tmp_path, [7], **how) == []


KEEPS = {"num_workers": 1, "persistent_workers": True}


def test_an_evaluation_whose_workers_are_kept_is_said_not_to_be_exact(tmp_path, caplog):
    """Before anything is trained, and again by the resume; and nothing of the training loader."""
    own = {"persistent_workers": True}
    how = {"items": 8, "workers": 1, "own": own, "judging": KEEPS}
    with caplog.at_level("INFO", "trainckpt"):
        tracked(tmp_path, {}, strike_at=2, **how)
        tracked(tmp_path, {}, strike_at=3, **how)
    why = "prepared loader 1 has persistent_workers=True and is not read through ckpt.loader"
    said = [line.partition(": ")[0] for line in caplog.messages if why in line]
    assert said == ["not exact", "not bitwise", "not exact"]
    assert "prepared loader 0 has" not in caplog.text
    assert any(": same data, not bitwise" in line for line in caplog.messages)


def test_an_evaluation_that_is_tracked_too_keeps_its_workers_randomness(tmp_path):
    """The way out that the warning names."""

    def judged_by(ckpt, training):
        ckpt.loader(training.loader)
        training.judged = ckpt.loader(training.judged)

    how = {"items": 12, "judging": KEEPS}
    assert compared(tmp_path, [8], prepare=judged_by, **how) == []


def test_another_accumulation_is_said_once_and_not_called_bitwise(tmp_path, caplog):
    with caplog.at_level("INFO", "trainckpt"):
        assert told_of(tmp_path, caplog, strike_at=5) == []
        assert told_of(tmp_path, caplog, strike_at=6) == ["bitwise"]
        other = ["same data, not bitwise: accelerator", "gradient_accumulation_steps was 4, is 2"]
        assert told_of(tmp_path, caplog, strike_at=7, accumulate=2) == other
        assert told_of(tmp_path, caplog, strike_at=8, accumulate=2) == ["bitwise"]


def test_another_precision_and_other_windows_are_said_and_not_called_bitwise(tmp_path, caplog):
    half = {"mixed": "bf16", "windows": {"sync_with_dataloader": False}}
    with caplog.at_level("INFO", "trainckpt"):
        told_of(tmp_path, caplog, strike_at=5)
        found = told_of(tmp_path, caplog, strike_at=6, **half)
        assert found[0] == "same data, not bitwise: accelerator"
        assert set("; ".join(found[1:]).split("; ")) == {
            "mixed_precision was no, is bf16",
            "sync_with_dataloader was True, is False",
        }
        assert told_of(tmp_path, caplog, strike_at=7, **half) == ["bitwise"]


def test_an_accumulation_that_the_script_sets_as_it_trains_is_no_other_one(tmp_path, caplog):
    def sets(ckpt, training):
        training.accelerator.gradient_accumulation_steps = 2

    with caplog.at_level("INFO", "trainckpt"):
        told_of(tmp_path, caplog, strike_at=5, prepare=sets)
        assert told_of(tmp_path, caplog, strike_at=6) == ["bitwise"]


def test_a_snapshot_from_before_the_accumulation_was_kept_is_loaded(tmp_path, caplog, monkeypatch):
    def older(self):
        return {name: v for name, v in now(self).items() if name != "gradient_accumulation_steps"}

    now = accelerate_attach.AcceleratorState.state_dict
    with monkeypatch.context() as patched, caplog.at_level("INFO", "trainckpt"):
        patched.setattr(accelerate_attach.AcceleratorState, "state_dict", older)
        told_of(tmp_path, caplog, strike_at=5)
    with caplog.at_level("INFO", "trainckpt"):
        assert told_of(tmp_path, caplog, strike_at=6, accumulate=2) == ["bitwise"]


def told_of(place, caplog, **how):
    """How exactly an attempt resumes, by its own word, and each reason why it is not bitwise."""
    caplog.clear()
    tracked(place, {}, **how)
    exact = re.findall(r"(?:this resume is|micro-batch \d:) (bitwise|same data.*)", caplog.text)
    return exact + [m.partition(": ")[2] for m in caplog.messages if m.startswith("not bitwise: ")]


def test_two_stops_in_one_window_and_a_change_of_epochs_are_exact(tmp_path):
    want, end = plain()
    seen = {}
    for at in (5, 6, 7):
        assert tracked(tmp_path, seen, strike_at=at) is None
    tracked(tmp_path, seen, epochs=2)
    assert tracked(tmp_path, seen) == end
    assert seen == want


def test_a_finished_run_started_again_trains_nothing(tmp_path):
    seen, again = {}, {}
    end = tracked(tmp_path, seen)
    assert tracked(tmp_path, again)[0] == end[0]
    assert again == {}


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_under_ddp_stop_at_one_micro_batch_and_go_on_bit_for_bit(tmp_path, world):
    """At three ranks also the order in which DDP adds up shows, after its first whole window."""
    how = {"items": 26, "use_seedable_sampler": world == 3}
    program = functools.partial(accelerate_training.of_ranks, **how)
    found = run_ranks(program, world, str(tmp_path), world, [2] if world == 2 else [4])
    assert found == [([], "DistributedDataParallel")] * world


def test_shards_of_fsdp2_that_accelerate_made_go_on_bit_for_bit(tmp_path):
    """On CPUs, where it has to be told that it may; inside a window, in two ranks."""
    found = run_ranks(accelerate_training.of_shards, 2, str(tmp_path), 2, [5])
    assert found == [([], {"DTensor"}, {"cpu"})] * 2


@pytest.mark.gpu
def test_shards_of_fsdp2_on_gpus_go_on_bit_for_bit(tmp_path):
    """Accelerate's own choice; on one GPU, or two where there are two."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: on CPUs Accelerate would use DDP in place of FSDP2")
    ranks = min(2, torch.cuda.device_count())
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    script = ("-m", "tests.integrations.accelerate_training", str(tmp_path))
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    told = subprocess.run(
        [sys.executable, *launch, *script], env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == ["[] {'DTensor'} {'cuda'}"] * ranks


def test_its_own_checkpoints_are_what_they_were(tmp_path):
    """The same files with and without us, and load_state reads them."""
    files = []
    for attached in (False, True):
        training = Training()
        if attached:
            ckpt = trainckpt.accelerate.attach(training.accelerator, tmp_path / "run")
        folder = tmp_path / f"own-{attached}"
        training.accelerator.save_state(str(folder))
        files.append({file.name: file.stat().st_size for file in folder.iterdir()})
        training.accelerator.load_state(str(folder))
    ckpt.close()
    assert files[0] == files[1]


# ---- wrong use


def refused(act, *words):
    with pytest.raises(ConfigurationError) as caught:
        act()
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.hint


def test_attaching_before_prepare_says_so(tmp_path):
    accelerator = fresh()
    attach = functools.partial(trainckpt.accelerate.attach, accelerator, tmp_path)
    refused(attach, "nothing was prepared", "after accelerator.prepare")


def test_attaching_twice_says_so_and_again_after_the_end_is_a_new_attempt(tmp_path):
    training = Training()
    attach = functools.partial(trainckpt.accelerate.attach, training.accelerator, tmp_path)
    ckpt = attach()
    refused(attach, "attached already", "keep the Checkpointer")
    ckpt.close()
    with attach() as again:
        assert again.attempt == 2


def test_loaders_that_cannot_be_restored_are_refused_in_one_sentence(tmp_path):
    training = Training()
    accelerator = training.accelerator
    with trainckpt.accelerate.attach(accelerator, tmp_path) as ckpt:
        loader = DataLoader(accelerate_training.Noisy(4))
        refused(lambda: ckpt.loader(loader), "not prepared", "accelerator.prepare(loader)")
        stream = accelerator.prepare(DataLoader(accelerate_training.Stream()))
        refused(lambda: ckpt.loader(stream), "process 0 alone", "map-style")
        accelerator.dataloader_config.dispatch_batches = True
        dispatched = accelerator.prepare(DataLoader(accelerate_training.Noisy(4)))
        refused(lambda: ckpt.loader(dispatched), "dispatch_batches", "leave")
        accelerator.dataloader_config.dispatch_batches = None
        skipping = accelerator.skip_first_batches(training.loader, 2)
        accelerator._dataloaders.append(skipping)
        refused(lambda: ckpt.loader(skipping), "skip_first_batches", "prepared loader itself")
        accelerator.prepare(torch.nn.Linear(1, 1))
        refused(lambda: ckpt.loader(training.loader), "after attach", "last accelerator.prepare")


def test_ranks_that_would_get_different_numbers_of_batches_are_refused(tmp_path):
    training = Training(items=22)
    shard = training.accelerator.prepare(DataLoader(accelerate_training.Noisy(6), 2))
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard

    dealt = BatchSamplerShard(shard.batch_sampler, 2, 0, even_batches=False)
    uneven = DataLoaderShard(accelerate_training.Noisy(6), batch_sampler=dealt)
    training.accelerator._dataloaders.append(uneven)
    with trainckpt.accelerate.attach(training.accelerator, tmp_path) as ckpt:
        refused(lambda: ckpt.loader(uneven), "different numbers of batches", "even_batches=True")


def dealt_unevenly(training, items, ranks, **how):
    """A loader of the first of so many ranks, which the Accelerator knows."""
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard

    data = accelerate_training.Noisy(items)
    batches = DataLoader(data, 4).batch_sampler
    dealt = BatchSamplerShard(batches, ranks, 0, **how)
    shard = DataLoaderShard(data, batch_sampler=dealt)
    training.accelerator._dataloaders.append(shard)
    return shard


@pytest.mark.parametrize(
    ("items", "ranks", "uneven"), [(21, 2, True), (22, 2, True), (23, 2, False), (24, 2, False)]
)
def test_split_batches_of_which_a_rank_gets_no_part_are_refused(tmp_path, items, ranks, uneven):
    """Accelerate says the same length of every rank there."""
    training = Training()
    shard = dealt_unevenly(training, items, ranks, split_batches=True, even_batches=False)
    with trainckpt.accelerate.attach(training.accelerator, tmp_path) as ckpt:
        if uneven:
            refused(lambda: ckpt.loader(shard), "(['5', '6'])", "even_batches=True")
        else:
            assert len(ckpt.loader(shard)) == 6


def test_a_loader_that_is_dealt_unevenly_from_its_next_pass_on_is_refused_there(tmp_path):
    """As join_uneven_inputs(even_batches=False) deals it."""
    training = Training()
    shard = dealt_unevenly(training, 20, 2)
    with trainckpt.accelerate.attach(training.accelerator, tmp_path) as ckpt:
        loader = ckpt.loader(shard)
        assert len(list(loader)) == 3
        shard.batch_sampler.even_batches = False
        refused(lambda: next(iter(loader)), "different numbers of batches", "join_uneven_inputs")


def test_another_model_is_refused_with_every_difference(tmp_path):
    tracked(tmp_path, {}, strike_at=3)
    training = Training()
    training.accelerator._models[0][3] = torch.nn.Linear(8, 2)
    with pytest.raises(StateMismatch, match=r"model/3\.weight has shape"):
        trainckpt.accelerate.attach(training.accelerator, tmp_path)


def test_kinds_of_training_whose_state_lies_elsewhere_are_refused(tmp_path, monkeypatch):
    training = Training()
    attach = functools.partial(trainckpt.accelerate.attach, training.accelerator, tmp_path)
    for kind, words in {
        "DEEPSPEED": "FSDP2",
        "MEGATRON_LM": "dist_checkpointing",
        "FSDP": "fsdp_version=2",
    }.items():
        monkeypatch.setattr(Accelerator, "distributed_type", kind)
        refused(attach, words)


def test_a_name_that_is_tracked_already_is_refused(tmp_path):
    training = Training()
    attach = functools.partial(trainckpt.accelerate.attach, training.accelerator, tmp_path)
    refused(lambda: attach(optimizer=training.optimizer), "tracks what was prepared", "leave it")


def test_importing_trainckpt_imports_no_trainer_and_one_is_reached_by_its_name():
    code = (
        "import sys, trainckpt\n"
        "assert not {'accelerate', 'transformers', 'lightning'} & sys.modules.keys()\n"
        "assert 'accelerate' in dir(trainckpt)\n"
        "sys.modules['accelerate'] = None\n"
        "try: trainckpt.accelerate\n"
        "except trainckpt.ConfigurationError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "trainckpt.accelerate needs the package accelerate" in told.stdout
    assert "pip install 'trainckpt[accelerate]'" in told.stdout
