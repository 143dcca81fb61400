"""A step that torch.compile has compiled is counted, and waits for copies, as any other."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.end_to_end.overlapped import Loop, Model, adam, as_saved
from trainckpt.save import coordinator, copying
from trainckpt.save.copying import OVERLAP
from trainckpt.state.step_hooks import untraced


@pytest.fixture(autouse=True)
def always_beside_training(monkeypatch):
    monkeypatch.setattr(copying, "choose", lambda *_: OVERLAP)
    for limit in ("NEARLY_S", "PATIENCE_S"):  # on a busy machine too no save is put off
        monkeypatch.setattr(coordinator, limit, 120.0)
    yield
    torch._dynamo.reset()


class Compiled(Loop):
    """Whose steps are."""

    def __init__(self, place, model, optimizers, what):
        (optimizer,) = optimizers
        step = {"step": optimizer.step, "caller": lambda: optimizer.step()}[what]
        self.step = torch.compile(step, backend="eager")
        super().__init__(place, model, optimizers)

    def train(self, number):
        ids = torch.arange(number, number + 40)
        torch.nn.functional.cross_entropy(self.model(ids), ids).backward()
        if number % 2:
            self.step()
            self.optimizers[0].zero_grad()


@pytest.mark.parametrize("what", ["step", "caller"])
def test_each_snapshot_is_the_state_of_its_boundary(tmp_path, what):
    model, other = Model(), Model()
    plain = Loop(tmp_path / "plain", other, adam(other))
    loop = Compiled(tmp_path / "compiled", model, adam(model), what)
    assert as_saved(tmp_path / "compiled", loop) == 8
    assert [save.snapshot for save in loop.saves] == [save.snapshot for save in plain.saves]


def test_what_compiles_is_not_imported_for_it(monkeypatch):
    def hook():
        return 1

    assert untraced(hook)() == 1
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert untraced(hook) is hook
