"""The three generators are read and written bitwise, without a draw."""

from __future__ import annotations

import importlib
import random
import sys

import numpy as np
import pytest
import torch

from tests.data.datasets import seed_all
from trainckpt.data.randomness import (
    capture,
    changed_since,
    is_own_module,
    main_rng,
    packed_rng,
    restore,
    set_main_rng,
)


def draws() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.randn(), float(torch.randn(()))]


def test_generators_go_on_where_they_were_read():
    """Also between the two halves of a pair of gaussians."""
    seed_all(3)
    draws()  # leaves a cached gaussian in Python and in NumPy
    state = main_rng()
    want = draws() + draws()
    seed_all(4)
    set_main_rng(state)
    assert draws() + draws() == want
    assert all(isinstance(state[key], bytes) for key in ("python", "numpy"))


def test_packed_generators_are_bytes_and_say_the_same():
    """What workers send home can be written back in the main process, and compared."""
    state = packed_rng()
    want = draws()
    assert packed_rng() != state
    set_main_rng(state)
    assert packed_rng() == state
    assert draws() == want


def test_only_generators_that_were_used_are_news():
    """A used-up cached gaussian counts, although no word of the generator changed."""
    np.random.seed(1)
    known = packed_rng()
    assert changed_since(known) == {}
    torch.rand(())
    assert set(changed_since(known)) == {"torch"}
    np.random.randn()
    random.random()
    assert set(changed_since(known)) == {"torch", "numpy", "python"}
    known = packed_rng()
    np.random.randn()
    assert set(changed_since(known)) == {"numpy"}


def test_the_children_of_a_generator_go_on_after_those_spawned():
    def make(seed=3):
        return np.random.default_rng(seed)

    rng = make()
    unspawned = capture({"rng": rng})
    rng.spawn(2)
    rng.random()
    saved = capture({"rng": rng})
    want = rng.spawn(1)[0].random(), rng.random()
    again = make()
    assert restore({"rng": again}, saved, "the script") == ""
    assert (again.spawn(1)[0].random(), again.random()) == want
    assert "rng cannot be put back" in restore({"rng": make(4)}, saved, "the script")
    assert b"spawned" not in unspawned["rng"]
    assert "rng cannot be put back" in restore({"rng": rng}, saved, "the script")  # it has 3


def test_an_engine_of_sobol_points_goes_on_after_those_drawn():
    engine = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
    engine.draw(5)
    saved = capture({"points": engine})
    want = engine.draw(4)
    again = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
    again.draw(2)
    assert restore({"points": again}, saved, "the script") == ""
    assert torch.equal(again.draw(4), want)
    undrawn = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
    first = capture({"points": undrawn})
    assert restore({"points": engine}, first, "the script") == ""
    assert torch.equal(engine.draw(4), undrawn.draw(4))
    for other in ((3, True, 2), (4, True, 1), (3, False, 1)):
        points = torch.quasirandom.SobolEngine(*other)
        assert "points cannot be put back" in restore({"points": points}, saved, "the script")


@pytest.mark.parametrize("place", ["lib/python3/dist-packages", "home/.local/site-packages"])
def test_a_package_is_no_module_of_the_script_s_wherever_python_finds_it(
    tmp_path, monkeypatch, place
):
    """Debian's own packages, and those below a venv, lie in none of sysconfig's folders."""
    for folder, name in ((tmp_path / place, "installed"), (tmp_path, "own")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}_here.py").touch()
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setitem(sys.modules, f"{name}_here", importlib.import_module(f"{name}_here"))
    is_own_module.cache_clear()
    assert not is_own_module("installed_here")
    assert is_own_module("own_here")
    is_own_module.cache_clear()
