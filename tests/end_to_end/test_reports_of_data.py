"""Public reports of wrong resumes, as programs: samplers and readers of a script's own."""

from __future__ import annotations

import logging
import queue
import random
import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.data.datasets import interrupted, straight
from tests.end_to_end.training import Crash
from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError


class ConsumedSamples:
    """Megatron-Bridge#4565: a cyclic batch sampler that counts the samples it has given out.

    A pass starts at the rest of the current epoch, so an offset applied twice shortens each epoch.
    """

    def __init__(self, total=14, batch=3):
        self.total, self.batch, self.consumed_samples = total, batch, 0

    def __len__(self):
        return self.total // self.batch

    def __iter__(self):
        whole = self.total - self.total % self.batch
        epoch, offset = divmod(self.consumed_samples, whole)
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(epoch))
        for ids in order[offset:whole].split(self.batch):
            self.consumed_samples += self.batch
            yield ids.tolist()


class Stateful(ConsumedSamples):
    """The same, with a state."""

    def state_dict(self):
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state):
        self.consumed_samples = state["consumed_samples"]


def loader_of(sampler, workers):
    data = TensorDataset(torch.arange(14.0))
    return lambda: DataLoader(data, batch_sampler=sampler(), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "stop",
    [pytest.param(2, marks=pytest.mark.long), 5, pytest.param(7, marks=pytest.mark.long), 11],
)
def test_an_offset_of_consumed_samples_is_used_once(stop, workers):
    whole = straight(loader_of(Stateful, workers))
    before, after = interrupted(loader_of(Stateful, workers), stop)
    assert before + after == whole
    assert after != whole[: len(after)]


def test_consumed_samples_without_a_state_are_named():
    with pytest.warns(UserWarning, match="consumed_samples changed over a pass, and is not kept"):
        interrupted(loader_of(ConsumedSamples, 0), 6)


class SeedAndEpoch:
    """ms-swift#10050: shuffles by seed + epoch, and is made anew with its loader."""

    def __init__(self, total=14):
        self.total, self.epoch = total, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.total

    def __iter__(self):
        generator = torch.Generator().manual_seed(40 + self.epoch)
        return iter(torch.randperm(self.total, generator=generator).tolist())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "stop",
    [3, pytest.param(7, marks=pytest.mark.long), 12, pytest.param(15, marks=pytest.mark.long)],
)
def test_an_order_of_seed_and_epoch_is_that_of_the_epoch_resumed_in(tmp_path, workers, stop):
    def ids(place, stop=None):
        model, got = torch.nn.Linear(1, 1), []
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        loader = DataLoader(torch.arange(14.0), 2, sampler=SeedAndEpoch(), num_workers=workers)
        tracked = {"model": model, "optimizer": optimizer, "loader": loader}
        with Checkpointer(place, every="1 steps", **tracked) as ckpt:
            for epoch in ckpt.epochs(3):
                for batch in ckpt.batches():
                    model(batch[:, None]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    got.append((epoch, batch.tolist()))
                    if len(got) == stop:
                        raise Crash
        return got

    whole = ids(tmp_path / "straight")
    assert len({str([batch for at, batch in whole if at == epoch]) for epoch in range(3)}) == 3
    with pytest.raises(Crash):
        ids(tmp_path / "run", stop)
    rest = ids(tmp_path / "run")
    assert rest == whole[stop - 1 :]
    assert rest != whole[: len(rest)]


class Buffered(IterableDataset):
    """datasets#7901: rows of chunks through a shuffle buffer, which its state leaves out."""

    def __init__(self, rows=30, size=7, seed=3):
        self.rows, self.size, self.seed, self.first, self.row = rows, size, seed, 0, 0

    def __iter__(self):
        first, self.first, buffer, generator = self.first, 0, [], random.Random(self.seed)
        for row in range(first, self.rows):
            self.row = row + 1
            buffer.append(row)
            if len(buffer) == self.size:
                yield float(buffer.pop(generator.randrange(self.size)))
        generator.shuffle(buffer)
        yield from map(float, buffer)

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.first = state["row"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "stop",
    [
        2,
        pytest.param(3, marks=pytest.mark.long),
        pytest.param(5, marks=pytest.mark.long),
        8,
        9,
        pytest.param(10, marks=pytest.mark.long),
        pytest.param(14, marks=pytest.mark.long),
    ],
)
def test_each_row_of_a_lost_shuffle_buffer_comes_once(stop, workers):
    def make():
        return DataLoader(Buffered(), 4, num_workers=workers)

    whole = straight(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that batches are loaded again
        before, after = interrupted(make, stop)
    assert before + after == whole
    assert after != whole[: len(after)]


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 8))]
)
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_few_batches_of_one_row_are_loaded_again_and_fill_the_lost_buffer(seed, stop):
    def make():
        return DataLoader(Buffered(rows=12, size=3, seed=seed), 1)

    whole = straight(make)
    before, after = interrupted(make, stop)
    assert before + after == whole


class Unrepeatable(IterableDataset):
    """Never goes back, so that no pass comes again."""

    def __init__(self):
        self.place = [0]

    def __iter__(self):
        for _ in range(20):
            self.place[0] += 1
            yield float(self.place[0])

    def state_dict(self):
        return {"place": self.place[0]}

    def load_state_dict(self, state):
        self.place[0] = max(self.place[0], state["place"])


def test_a_state_that_nothing_could_be_compared_with_is_named():
    def make():
        return DataLoader(Unrepeatable(), 4)

    with pytest.warns(UserWarning, match="the position of Unrepeatable is inferred"):
        interrupted(make, 2)


class Prompts:
    """NeMo-RL#3599: a thread takes prompts ahead of training and finishes them out of order.

    Each pair of prompts comes back in the other order. `taken` counts the prompts that the thread
    has taken, `done` those that training has got.
    """

    def __init__(self, number=24):
        self.number, self.taken, self.done = number, 0, 0

    def __iter__(self):
        finished = queue.Queue(maxsize=8)
        first, self.done = self.done, 0
        producer = threading.Thread(target=self._produce, args=(finished, first), daemon=True)
        producer.start()
        for _ in range(first, self.number):
            prompt = finished.get()
            self.done = prompt[0]
            yield torch.tensor([float(prompt[1])])
        producer.join()
        self.done = self.taken = 0

    def _produce(self, finished, first):
        for count in range(first, self.number):
            self.taken = count + 1
            finished.put((count + 1, count ^ 1))


class Frontier(Prompts):
    """Its state is what training has got."""

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Ahead(Prompts):
    """Its state is what the thread has taken: prompts in flight are lost with it."""

    def state_dict(self):
        return {"done": self.taken}

    def load_state_dict(self, state):
        self.done = state["done"]


def prompts(place, reader, stop=None):
    """Train over the reader; return the prompts trained on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    got = []
    tracked = {"model": model, "optimizer": optimizer, "loader": reader()}
    with Checkpointer(place, every="1 steps", **tracked) as ckpt:
        for _ in ckpt.epochs(4):
            for prompt in ckpt.batches():
                model(prompt).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                got.append(prompt.item())
                if len(got) == stop:
                    raise Crash
    return got


def stopped_and_resumed(place, reader, stop):
    whole = prompts(place / "straight", reader)
    with pytest.raises(Crash):
        prompts(place / "run", reader, stop=stop)
    return whole, prompts(place / "run", reader)


@pytest.mark.parametrize("stop", [9, pytest.param(57, marks=pytest.mark.long)])
def test_a_cursor_of_what_was_trained_loses_no_prompt_in_flight(tmp_path, stop):
    whole, rest = stopped_and_resumed(tmp_path, Frontier, stop)
    assert rest == whole[stop - 1 :]
    assert rest != whole[: len(rest)]


def test_prompts_in_flight_that_a_cursor_loses_are_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "trainckpt")
    whole, rest = stopped_and_resumed(tmp_path, Ahead, 57)
    assert len(rest) < len(whole) - 56
    assert "as exact as Ahead's own state (loader)" in caplog.text
    assert "where 24 were expected" in caplog.text
    assert "same data, not bitwise" in caplog.text


def test_a_reader_without_a_state_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="its position cannot be kept"):
        prompts(tmp_path, Prompts)
