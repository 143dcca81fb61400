"""What a resume knows of the lists, arrays and tensors in a dataset."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from tests.data import datasets as d
from tests.data.datasets import Rows
from trainckpt.data.compared_content import content
from trainckpt.data.loader import TrackedLoader


def differing(one, other):
    before, after = content(one), content(other)
    return sorted(path for path in before if before[path] != after[path])


@pytest.mark.parametrize(
    "value",
    [
        list(range(1000)),
        [f"{number}.png" for number in range(1000)],
        [{"file": f"{number}.png"} for number in range(1000)],
        torch.arange(5000.0).view(1000, 5),
        np.arange(1000),
    ],
    ids=["indices", "files", "records", "tensor", "array"],
)
def test_another_order_is_another_content(value):
    rows = Rows(values=value)
    flipped = value.flip(0) if isinstance(value, torch.Tensor) else value[::-1]
    assert differing(Subset(rows, [1, 2]), Subset(Rows(values=flipped), [1, 2])) == [
        "dataset.dataset.values"
    ]
    assert differing(rows, Rows(values=value[:])) == []


def test_the_folder_of_the_files_does_not_count():
    here, there = (Rows(files=[f"{place}/{n}" for n in "abc"]) for place in ("/data", "/tmp/9"))
    assert differing(here, there) == []


CHANGES = {
    "replaced": lambda rows: vars(rows).update(labels=torch.ones(8)),
    "written": lambda rows: rows.labels.__setitem__(5, 1),
    "written in the middle": lambda rows: rows.many.__setitem__(51234, 1),
    "written in a tuple": lambda rows: rows.pair[1].__setitem__(5, 1),
    "an array written": lambda rows: rows.array.__setitem__(5, 1),
    "a list replaced": lambda rows: vars(rows).update(files=["b"]),
}
CHANGED = {"written in the middle": "many", "written in a tuple": "pair"}
CHANGED |= {"an array written": "array", "a list replaced": "files"}


def labelled():
    return Rows(
        labels=torch.zeros(8),
        many=torch.zeros(1 << 17),
        pair=(torch.zeros(8), torch.zeros(8)),
        array=np.zeros(8),
        files=["a"],
    )


def resumed(saved, rows):
    """Return what the first batch of a resume with this dataset reports."""
    told = []
    loader = TrackedLoader(DataLoader(rows, 2), name="loader", report=told.append)
    loader.load_state(saved)
    next(iter(loader))
    return [part.reason for part in told]


@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_names_what_the_run_had_changed_unless_it_is_changed_again(change):
    rows = labelled()
    loader = TrackedLoader(DataLoader(rows, 2), name="loader")
    batches = iter(loader)
    next(batches)
    CHANGES[change](rows)
    (reason,) = resumed(loader.state(), labelled())
    name = CHANGED.get(change, "labels")
    assert f"loader: dataset.{name} was replaced or written during training" in reason
    again = labelled()
    CHANGES[change](again)
    assert resumed(loader.state(), again) == []


def test_a_resume_does_not_name_what_the_run_left_as_it_was():
    rows = labelled()
    loader = TrackedLoader(DataLoader(rows, 2), name="loader")
    batches = iter(loader)
    next(batches)
    rows.added = torch.ones(3)
    saved = loader.state()
    assert saved["changed content"] == {}
    assert resumed(saved, labelled()) == []


def resume(values, change=None):
    """Save after a batch; return what a resume with the same dataset reports."""
    told = []
    loader = TrackedLoader(DataLoader(Rows(files=list("abcdefgh")), 2), name="loader")
    batches = iter(loader)
    next(batches)
    if change is not None:
        loader.underlying.dataset.files[:] = change
    again = DataLoader(Rows(files=values), 2)
    resumed = TrackedLoader(again, name="loader", report=told.append)
    resumed.load_state(loader.state())
    next(iter(resumed))
    return [part.reason for part in told]


class Listed(d.Stream):
    def __init__(self, files):
        self.files = files


class Shards(d.StatefulStream):
    """A stream with a state, of files in an order that its state does not hold."""

    def __init__(self, files):
        super().__init__()
        self.files = files


@pytest.mark.parametrize("is_stateful", [True, False])
@pytest.mark.parametrize("batches", [1, 7, 12])  # in its pass, at the end, and after it
def test_a_resume_names_files_of_a_stream_in_another_order(batches, is_stateful):
    def begun(files, **options):
        rows = Shards(files) if is_stateful else Listed(files)
        return TrackedLoader(DataLoader(rows, 2), name="loader", **options)

    told = []
    loader = begun([1, 2, 3, 4])
    for _ in zip(range(batches), loader, strict=False):
        pass
    resumed = begun([1, 2, 4, 3], report=told.append, before_first_fetch=lambda: True)
    resumed.load_state(loader.state())
    next(iter(resumed), None)
    assert any("loader: dataset.files differs" in part.reason for part in told)


def test_a_resume_names_content_that_differs_from_the_snapshot_s():
    (reason,) = resume(list("hgfedcba"))
    assert "loader: dataset.files differs from the snapshot's" in reason


def test_a_resume_does_not_name_content_that_is_the_same_or_that_the_run_changes():
    assert resume(list("abcdefgh")) == []
    assert resume(list("abcdefgh"), change=list("hgfedcba")) == []
