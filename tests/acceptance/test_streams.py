"""Every row of docs/streams.md: uninterrupted == resumed != begun anew, or refused, as it says.

A script may seed itself otherwise as it resumes, by the time say: so do these.
"""

from __future__ import annotations

import concurrent.futures
import json
import queue
import random
import re
from pathlib import Path

import pytest
import torch

from tests.acceptance.stream_makers import BATCH, SAMPLES, Source, makers
from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError

PAGE = (Path(__file__).parents[2] / "docs/streams.md").read_text(encoding="utf-8")
EPOCHS, WINDOW = 3, 2


def table():
    """The rows of the page's table: stream, workers, exactness, way, samples read again."""
    section = PAGE.split("## How exact each one is\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [[cell.replace("`", "") for cell in row] for row in cells[1:]]


def examples():
    """The classes of the page's examples."""
    names = {"__name__": "page", "torch": torch, "queue": queue, "concurrent": concurrent}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if block.startswith("class "):
            exec(block, names)
    return names


MAKERS = makers(examples())
ROWS = {(row[0], int(workers)): row[2:] for row in table() for workers in row[1].split(", ")}


def train(place, make, stop=None, *, until_epoch=EPOCHS, seed=0):
    """Train to the end, or to a batch or epoch; return samples, losses and weights."""
    random.seed(seed)
    torch.manual_seed(seed)
    loader = make()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    lines = []
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    with Checkpointer(place, every="never", **tracked) as ckpt:
        for epoch in ckpt.epochs(EPOCHS):
            if epoch == until_epoch:
                return lines, None
            if hasattr(getattr(loader, "dataset", None), "set_epoch"):
                loader.dataset.set_epoch(epoch)
            for batch in ckpt.batches():
                x = batch.flatten()[:, None] / SAMPLES
                loss = (model(x) - x.square()).square().mean()
                loss.backward()
                lines.append((epoch, batch.tolist(), loss.item().hex()))
                if ckpt.cursor.micro + 1 == WINDOW:
                    optimizer.step()
                    optimizer.zero_grad()
                if len(lines) == stop:
                    assert ckpt.cursor.micro == 0, "the stop is not inside a window"
                    return lines, None
    return lines, [parameter.tolist() for parameter in model.parameters()]


def stop_inside(lines, epoch):
    """Return the number of batches up to a stop inside a window, two thirds into the epoch."""
    before = sum(line[0] < epoch for line in lines)
    stop = before + sum(line[0] == epoch for line in lines) * 2 // 3
    return stop + (stop + 1) % WINDOW


def test_each_row_of_the_page_has_a_loader_and_each_loader_its_rows():
    assert set(ROWS) == {(name, workers) for name in MAKERS for workers in (0, 2)}


@pytest.mark.long
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(("name", "workers"), ROWS)
@pytest.mark.filterwarnings("ignore")  # of the packages; what a resume says is in its record
def test_a_row_of_the_page_is_true(tmp_path, name, workers, epoch):
    exactness, way, again = ROWS[name, workers]
    source = Source(tmp_path)

    def make():
        return MAKERS[name](workers, source)

    if exactness == "refused":
        with pytest.raises(ConfigurationError) as refused:
            train(tmp_path / "refused", make)
        assert way in str(refused.value)
        return
    whole, weights = train(tmp_path / "whole", make)
    reads = [source.reads]
    before, _ = train(tmp_path / "run", make, stop_inside(whole, epoch))
    reads.append(source.reads)
    rest, resumed_weights = train(tmp_path / "run", make, seed=1)
    reads.append(source.reads)
    outcome = json.loads((tmp_path / "run/attempts/2.json").read_text())["outcome"]
    assert outcome["exactness"].replace(" (loader)", "") == exactness
    if exactness == "same data, not bitwise":
        assert before + rest != whole
        return
    begun_anew = [line for line in whole if line[0] >= epoch][: len(rest)]
    if name.startswith("producer"):  # in the order of its threads' timing
        assert samples_of(before) != sorted(samples_of(before))
        assert sorted(samples_of(before + rest)) == sorted(samples_of(whole))
        left = reads[0] - (reads[1] - reads[0])
    else:
        assert before + rest == whole
        assert resumed_weights == weights
        left = reads[0] - (reads[1] - reads[0]) if workers == 0 else samples_left(name, rest)
    assert samples_of(rest) != samples_of(begun_anew)
    if again != "all":
        limit = again.split(", ")[epoch]
        count = reads[2] - reads[1] - left
        assert count <= int(limit.removeprefix("≤ "))
        assert count == int(limit.removeprefix("≤ ")) or limit.startswith("≤ ")


BETWEEN = [
    row
    for row, (exactness, *_) in ROWS.items()
    if exactness != "refused" and not row[0].startswith("producer")  # a trial would wait for ever
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "workers"), BETWEEN)
@pytest.mark.filterwarnings("ignore")
def test_a_row_resumes_between_two_epochs_exactly_or_says_that_it_may_not(tmp_path, name, workers):
    source = Source(tmp_path)

    def make():
        return MAKERS[name](workers, source)

    whole, weights = train(tmp_path / "whole", make)
    before, _ = train(tmp_path / "run", make, until_epoch=1)
    assert {line[0] for line in before} == {0}
    rest, resumed_weights = train(tmp_path / "run", make, seed=1)
    assert rest[0][0] == 1
    outcome = json.loads((tmp_path / "run/attempts/2.json").read_text())["outcome"]
    if ROWS[name, workers][0] == "same data, not bitwise":
        assert outcome["exactness"].startswith("same data, not bitwise")
    elif "MultiNode" in name:  # its state lacks whether the samplers inside have begun
        assert outcome["exactness"] == "as exact as Loader's own state (loader)"
    else:
        assert (before + rest, resumed_weights) == (whole, weights)


def samples_of(lines):
    return [(epoch, samples) for epoch, samples, _ in lines]


def samples_left(name, rest):
    """Return the number of samples that a resume has to read; workers have read some ahead."""
    return BATCH * len(rest) if "packs" in name else sum(len(line[1]) for line in rest)
