"""Variables that a loop carries from batch to batch are named where a resume has others."""

from __future__ import annotations

import runpy
from textwrap import indent

import pytest

from trainckpt.state.captured import Captured, Saved
from trainckpt.state.registry import Registry
from trainckpt.state.script_variables import PART, ScriptVariables

HEAD = """
import enum, functools, itertools, time
from collections import deque, namedtuple
import numpy, torch, trainckpt
from torch import nn

Pair = namedtuple("Pair", "h c")
Phase = enum.Enum("Phase", "warm cold")

class Keeper:
    def __init__(self, **values):
        vars(self).update(values)

class Slotted:
    __slots__ = ("h",)

class Learner:
    def __init__(self):
        self.h = torch.zeros(2)
    def step(self):
        self.h = self.h + 1

class Warming:
    def __init__(self, optimizer):
        self.optimizer, self.n = optimizer, 0
    def zero_grad(self): self.optimizer.zero_grad()
    def step(self):
        self.n += 1
        self.optimizer.step()

class Loader:
    __module__ = "trainckpt.data.loader"
    def __iter__(self): return self
    def __next__(self): return 0

"""
LOOP = """
{before}
for batch in batches():
{body}
"""
IN_A_FUNCTION = """
def main():
{before}
    for batch in batches():
{body}

main()
"""


class Script:
    """A script with a loop, and what its attempts save after some batches."""

    def __init__(self, folder, form=LOOP):
        self._path, self._form, self._attempts = folder / "script.py", form, 0
        self.stored = {}
        self.differing = None

    def attempt(self, before, body="pass", *, batches=3, is_own=True):
        """Run the loop up to a save; return the names that differ at its first batch, if any."""
        is_module = self._form == LOOP
        text = self._form.format(
            before=before if is_module else indent(before, "    "),
            body=indent(body, "    " if is_module else "        "),
        )
        self._path.write_text(HEAD + text)
        registry = Registry()
        variables = ScriptVariables(registry)
        self._attempts += 1

        def boundaries():
            for number in range(batches + 1):
                if number == 0:
                    variables.begin("run")
                    saved = Saved({}, self.stored, is_own=is_own)
                    self.differing = variables.differing(saved)
                if number == batches:
                    out = Captured()
                    variables.capture(out)
                    self.stored = out.values
                    return
                yield number

        boundaries.__module__ = "trainckpt"  # as `Checkpointer.batches`
        given = {"batches": boundaries, "track": registry.add, "attempt": self._attempts}
        given["use"] = lambda *values: None
        runpy.run_path(str(self._path), given, run_name="__main__")
        return self.differing


@pytest.fixture(params=[LOOP, IN_A_FUNCTION], ids=["module", "function"])
def script(request, tmp_path):
    return Script(tmp_path, request.param)


def with_a_use(body, names):
    """A body of the loop that does not only print these variables."""
    return f"{body}\nuse({', '.join(name.partition('.')[0] for name in names.split())})"


TENSORS = {
    "a tensor": ("h = torch.zeros(4)", "h = h + 1", "h"),
    "a tensor written in place": ("h = torch.zeros(9999)", "h[3000:5000] += 1", "h"),
    "a transposed one": ("h = torch.zeros(50, 30).t()", "h[5:9] += 1", "h"),
    "none at first": ("h = None", "h = torch.ones(2) if h is None else h + 1", "h"),
    "a tuple": ("h = (torch.zeros(2), torch.zeros(2))", "h = (h[0] + 1, h[1])", "h"),
    "a named tuple": ("h = Pair(torch.zeros(2), 0)", "h = Pair(h.h + 1, 0)", "h"),
    "a dict": ("h = {}", "h[batch] = torch.ones(3)", "h"),
    "a queue": ("h = deque(maxlen=2)", "h.append(torch.full((2,), batch))\nsum(h)", "h"),
    "an array": ("h = numpy.zeros(3)", "h += 1", "h"),
    "a module": ("h = nn.Linear(2, 2)", "h.weight.data += 1", "h"),
    "a module in a dict": ("h = {'t': nn.Linear(2, 2)}", "h['t'].weight.data += 1", "h"),
    "a buffer": ("h = nn.BatchNorm1d(2)", "h(torch.ones(2, 2) * batch)", "h"),
    "an optimizer": (
        "p = [torch.ones(2, requires_grad=True)]\nh = torch.optim.Adam(p)\n",
        "p[0].grad = torch.ones(2)\nh.step()",
        "h p",
    ),
    "a scheduler": (
        (
            "o = torch.optim.SGD([torch.ones(2)], 0.1)\ntrack('o', o)\n"
            "h = torch.optim.lr_scheduler.StepLR(o, 5)"
        ),
        "o.step()\nh.step()",
        "h",
    ),
    "a wrapper of an optimizer": (
        "o = torch.optim.SGD([torch.ones(2)], 0.1)\ntrack('o', o)\nh = Warming(o)",
        "h.step()",
        "h.n",
    ),
    "in an object": ("k = Keeper(h=torch.zeros(2), n=1)", "k.h = k.h + 1", "k.h"),
    "in an object in it": ("k = Keeper(h=Keeper(h=torch.zeros(2)))", "k.h.h += 1", "k.h"),
    "a stream of its own": (
        "def stream():\n    for i in range(99):\n        yield i\nh = stream()",
        "print(next(h))",
        "h",
    ),
    "a stream of a permutation": (
        "def stream():\n    while True:\n        yield from torch.randperm(9)\nh = stream()",
        "print(next(h))",
        "h",
    ),
    "in slots": ("k = Slotted()\nk.h = torch.zeros(2)", "k.h = k.h + 1", "k.h"),
    "in the object of a method": ("h = Learner().step", "h()", "h.h"),
    "in a partial": (
        "def add(h, n):\n    h += n\nh = functools.partial(add, torch.zeros(2), n=1)",
        "h()",
        "h.args[0]",
    ),
    "on a function": ("def f():\n    f.h = f.h + 1\nf.h = torch.zeros(2)", "f()", "f.h"),
    "in a default": ("def f(h={}):\n    h[len(h)] = torch.ones(2)", "f()", "f.h"),
    "in a closure": (
        (
            "def make():\n    h = torch.zeros(2)\n    def f():\n        h.add_(1)\n    return f\n"
            "f = make()"
        ),
        "f()",
        "f.h",
    ),
    "a cycle of tasks": ("h = itertools.cycle('abcde')", "print(next(h))", "h"),
    "a cycle in a later pass": ("h = itertools.cycle('ab')", "print(next(h))", "h"),
    "an iterator over a list": ("h = iter([3] * 99)", "print(next(h))", "h"),
    "a count": ("h = itertools.count()", "print(next(h))", "h"),
    "a number in the loss": (
        "h = 0.5\nw = torch.ones((), requires_grad=True)",
        "h += 0.1\nloss = w * h\nloss.backward()\nw.grad = None",
        "h",
    ),
    "a count of steps": ("h = 0", "h += 1\nif h % 6 == 0:\n    use(h)", "h"),
    "of another attempt": ("torch.manual_seed(attempt)\nh = torch.rand(4)", "use(h)", "h"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_those_with_tensors_are_named(script, case):
    before, body, names = TENSORS[case]
    before, body = f"torch.manual_seed(0)\n{before}", with_a_use(body, names)
    assert script.attempt(before, body) == ([], [])
    assert script.attempt(before, body) == (names.split(), [])


NUMBERS = {
    "a number": ("best = 0.5", "best += 1", "best"),
    "no number at first": ("best = None", "best = min(best or 9, 5.0)", "best"),
    "a tensor with one element": ("total = torch.zeros(())", "total += 1", "total"),
    "a number of NumPy": ("total = numpy.float32(1)", "total += 1", "total"),
    "a text": ("kind = 'warm'", "kind = kind + '!'", "kind"),
    "an enumeration": ("phase = Phase.warm", "phase = Phase.cold if phase else 0", "phase"),
    "a list": ("losses = []", "losses.append(0.5)\nsum(losses)", "losses"),
    "a long list": ("losses = [0] * 999", "losses[0] += 1", "losses"),
    "a set": ("seen = set()", "seen.add(batch)", "seen"),
    "a dict": ("counts = {'a': 0}", "counts['a'] += 1", "counts"),
    "in an object": ("stop = Keeper(best=1, wait=0)", "stop.best = 2", "stop.best"),
    "a new one in an object": ("stop = Keeper()", "stop.best = 2", "stop.best"),
    "in objects of a list": ("hooks = [Keeper(n=0)]", "hooks[0].n += 1", "hooks"),
    "the option of a loss": (
        "h = nn.CrossEntropyLoss(label_smoothing=0.5)",
        "h.label_smoothing *= 0.5",
        "h",
    ),
    "several": ("a = b = 0", "a += 1\nb = b + a", "a b"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_and_texts_are_told_apart_from_tensors(script, case):
    before, body, names = NUMBERS[case]
    body = with_a_use(body, names)
    assert script.attempt(before, body) == ([], [])
    assert script.attempt(before, body) == ([], names.split())


ALIKE = {
    "a look at a batch": ("x, y = torch.zeros(3), 1", "x, y = torch.ones(3), batch\nuse(x)"),
    "a variable of a loop": ("for i in range(3):\n    pass", "for i in range(batch):\n    pass"),
    "made in the loop": ("", "loss = torch.ones(2) * batch\nuse(loss)"),
    "a sum that is printed": ("h, n = torch.zeros(3), 0", "h += 1\nn += 1\nprint(h / n)"),
    "a matrix that is printed": ("h = numpy.zeros((3, 3))", "h[batch, 0] += 1\nprint(h.sum())"),
    "a list of samples": ("h = []", "h.append(torch.ones(2))\nprint(len(h))"),
    "the wall clock": ("t = time.time()", "use(t)\nt = time.time()"),
    "another clock": ("t = time.perf_counter()", "use(t)\nt = time.monotonic()"),
    "a clock in nanoseconds": ("t = time.time_ns()", "use(t)\nt = time.perf_counter_ns()"),
    "a timer": ("k = Keeper(t=time.time(), n=1)", "k.t = time.time()"),
    "the name of a run": ("name = f'run {attempt}'", "use(name)"),
    "a path": ("path = '/'", "path = path + f'/{attempt}'\nuse(path)"),
    "settings": ("k = Keeper(rate=0.1, name=f'run {attempt}')", "use(k.rate)"),
    "a tracked model": (
        (
            "m = nn.Sequential(nn.Linear(2, 2))\ntrack('m', m)\nlayer, w = m[0], m[0].weight\n"
            "p = list(m.parameters())\nwrapped = nn.Sequential(m)\nk = Keeper(m=m, w=w)"
        ),
        "w.data += 1\nuse(m, layer, p, wrapped, k)",
    ),
    "a tracked optimizer": (
        (
            "p = [torch.ones(2, requires_grad=True)]\no = torch.optim.Adam(p)\ntrack('o', o)\n"
            "k = Keeper(o=o)"
        ),
        "p[0].grad = torch.ones(2)\no.step()\nuse(k)",
    ),
    "a Checkpointer of one's own": (
        "class Own(trainckpt.Checkpointer):\n    def __init__(self): self.n = 0\nk = Own()",
        "k.n += 1",
    ),
    "a frozen module": ("torch.manual_seed(0)\nm = nn.Linear(2, 2)", "m(torch.ones(2))"),
    "a generator": ("g = torch.Generator()", "torch.rand((), generator=g)"),
    "a stream that the script moves on": (
        "def stream(i):\n    while True:\n        i += 1\n        yield i\nh = stream(attempt * 9)",
        "next(h)",
    ),
    "a stream without a position": (
        "def stream():\n    while True:\n        yield torch.rand(1)\nh = stream()\nnext(h)",
        "next(h)",
    ),
    "a stream of tracked batches": (
        (
            "def stream():\n    while True:\n"
            "        for i, b in enumerate(zip(Loader(), range(9))):\n            yield i\n"
            "h = stream()"
        ),
        "next(h)",
    ),
    "a cycle after whole rounds": ("h = itertools.cycle('abc')", "print(next(h))"),
    "a function without state": ("def f(n=1):\n    return n", "print(f())"),
    "a bar of another package": (
        "bar = type('Bar', (), {'__module__': 'bars'})()\nbar.n = 0",
        "bar.n += 1",
    ),
    "an object that holds itself": ("k = Keeper(n=1)\nk.me = k", "use(k)"),
    "functions and classes": ("f, k = len, Keeper", "use(f, k)"),
}


@pytest.mark.parametrize("case", ALIKE)
def test_those_that_carry_nothing_are_not_named(script, case):
    assert script.attempt(*ALIKE[case]) == ([], [])
    assert script.attempt(*ALIKE[case]) == ([], [])


@pytest.mark.parametrize("case", ["pass", "print(batch)", "x = batch", "t = time.time()\nprint(t)"])
def test_a_loop_that_carries_nothing_stores_nothing(script, case):
    script.attempt("name, t, x = 'a', 0.5, 1\nprint(name)", case)
    assert script.stored == {}


def test_what_the_script_sets_itself_is_not_named(script):
    script.attempt("h, n = torch.zeros(2), 0", "h, n = h + 1, n + 1\nuse(h, n)")
    assert script.attempt("h, n = torch.full((2,), 3.0), 3", "use(h, n)") == ([], [])


def test_what_an_attempt_leaves_as_it_was_is_compared_again(script):
    script.attempt("n = 0", "n += 1\nuse(n)")
    script.attempt("n = 3", "use(n)")
    assert script.attempt("n = 0", "use(n)") == ([], ["n"])


def test_a_global_that_a_function_changes_is_named(tmp_path):
    before = "n = 0\ndef step():\n    global n\n    n += 1"
    script = Script(tmp_path)
    script.attempt(before, "step()")
    assert script.attempt(before, "step()") == ([], ["n"])


def test_a_variable_that_a_closure_changes_is_named(tmp_path):
    before = "n = 0\ndef step():\n    nonlocal n\n    n += 1"
    script = Script(tmp_path, IN_A_FUNCTION)
    script.attempt(before, "step()")
    assert script.attempt(before, "step()") == ([], ["n"])


def test_the_variables_of_another_rank_are_not_compared(script):
    body = "h = h + 1\nuse(h)"
    script.attempt("h = torch.zeros(2)", body)
    assert script.attempt("h = torch.zeros(2)", body, is_own=False) == ([], [])


def test_at_most_so_many_variables_are_looked_at(script):
    before = "\n".join(f"h{n} = torch.zeros(2)" for n in range(99))
    script.attempt(before, "\n".join(f"h{n} = h{n} + 1\nuse(h{n})" for n in range(99)))
    assert len(script.stored[PART]["tensors"]) == 64
