"""A variable reaches only the output where every use of it prints it, logs it or changes it."""

from __future__ import annotations

import linecache
import runpy
import sys
from textwrap import indent

import pytest

from trainckpt.state.output_names import what_names_reach

BEFORE = """
import collections, copy, io, logging, sys
import numpy, torch
from torch.nn import init

logger, stream, queue = logging.getLogger("training"), io.StringIO(), collections.deque()

class Meter:
    def update(self, value): pass
    def write(self, value): pass
    def step(self, value): pass
    def mean(self, value): return value

def train(value): (model(torch.ones(3)) * value).sum().backward()

meter, model, flag = Meter(), torch.nn.Linear(3, 3), False

def use(*values): return torch.zeros(3)

"""
VARIABLES = "x, y, z, k = torch.zeros(3), torch.zeros(3), torch.zeros(3), 0\n"
TAIL = "\nfor batch in batches():\n"


def only_printed(folder, body, *, head=""):
    """Those of x, y, z and k that reach only the output, as the loop takes its first batch."""
    return reached(folder, body, head=head, kind="output")


def reached(folder, body, *, head="", kind):
    found = []
    script = VARIABLES + head + TAIL + indent(body, "    ") + "\n"
    function = "def main():\n" + indent(script, "    ") + "\nmain()\n"
    for form, text in (("module", script), ("function", function)):
        seen = []

        def batches(seen=seen):
            seen.append(getattr(what_names_reach(sys._getframe(1)), kind) & set("xyzk"))
            return ()

        path = folder / f"{form}.py"
        path.write_text(BEFORE + text)
        runpy.run_path(str(path), {"batches": batches})
        found.append("".join(sorted(seen[0])))
    assert found[0] == found[1], "it is in a function as in a module"
    return found[0]


ONLY_PRINTED = {
    "printed": ("print(x)", "x"),
    "printed in a text": ("print(f'{x.sum() / k:.3f}', 'y %s' % y.tolist())", "xyk"),
    "printed by way of functions": ("print(torch.stack(list(x)).mean(), max(y))", "xy"),
    "a sum": ("x += torch.bincount(batch, minlength=3)\nprint(x)", "x"),
    "a count": ("k += 1\nprint(k / len(batch))", "k"),
    "a matrix": ("x[y, y.argmax(1)] += 1\nprint(x.diag().sum() / x.sum())", "xy"),
    "changed in place": ("x.index_put_((y,), torch.ones(3), accumulate=True)\nprint(x)", "xy"),
    "of values that are used": ("x += y\nuse(y)\nprint(x)", "x"),
    "a list": ("x = []\nx.append(use().detach())\nprint(x)", "x"),
    "a queue": ("x = collections.deque(maxlen=5)\nx.append(y.item())\nprint(sum(x))", "xy"),
    "lists in a dict": ("x = {'loss': []}\nx['loss'].append(y.item())\nprint(x['loss'])", "xy"),
    "by way of another": ("y = x / k\nz, k = y.max(), 5\nprint(z)", "xyz"),
    "logged": ("logger.info('%s', x)\nsys.stdout.write(f'{y}')\nstream.write(str(z))", "xyz"),
    "written to a file": ("with open('log', 'w') as f:\n    f.write(f'{x}')", "x"),
    "the highest one": ("x = torch.maximum(x, y)\nk = max(k, 5) if k else 1\nprint(x, k)", "xyk"),
    "with a walrus": ("print(k := k + 1)", "k"),
    "in a comprehension": ("print([float(one) for one in x], {i: y[i] for i in range(3)})", "xy"),
    "an alias that is printed": ("x = y\nx += 1\nprint(x, y)", "xy"),
    "under a test": ("if k % 10 == 0:\n    print(x)\n    x = torch.zeros(3)", "x"),
}


@pytest.mark.parametrize("case", ONLY_PRINTED)
def test_what_is_only_printed_is_found(tmp_path, case):
    body, names = ONLY_PRINTED[case]
    assert set(names) <= set(only_printed(tmp_path, body))


USED = {
    "prototypes in a loss": ("x += use()\ny = x / k\nuse(z, y)", "xyzk"),
    "a sum for a scheduler": ("k += 1\nmeter.step(k)", "k"),
    "printed after a call": ("print(meter.step(x), use(y), next(z))", "xyz"),
    "the best one": ("if k > z:\n    z = k", "zk"),
    "a while": ("while k < 5:\n    k += 1", "k"),
    "an alias": ("y = x\nx += 1\nprint(x)\nuse(y)", "xy"),
    "an alias that is changed": ("y = x\ny += 1\nprint(y)\nuse(x)", "xy"),
    "two names for one": ("x = y = torch.zeros(3)\nx += 1\nprint(x)\nuse(y)", "xy"),
    "an item of a container": ("x = [y]\nx[0] += 1\nprint(x)\nuse(y)", "xy"),
    "an item taken out": ("x = [y]\nz = x[0]\nz += 1\nprint(z)\nuse(y)", "xyz"),
    "an item that was put in": ("x = []\nx.append(y)\nx[-1] += 1\nuse(y)", "xy"),
    "a container of it": ("x = {'y': y}\ny += 1\nuse(x)", "xy"),
    "a view of it": ("x = y.view(-1)\nx += 1\nprint(x)\nuse(y)", "xy"),
    "a weight": ("x = model.weight\nx += 1\nprint(x)", "x"),
    "an unknown object": ("x = use()\nx += 1\nprint(x)", "x"),
    "in a closure": ("y += 1\nf = lambda: use(y)\nf()", "y"),
    "in a function": ("def f():\n    return x\nprint(x)\nf()", "x"),
    "in a class": ("class Of:\n    held = x\nprint(x)", "x"),
    "in a comprehension": ("y = [use(one) for one in x]", "x"),
    "a number of calls": ("y = [use() for _ in range(k)]\nz = k and use()", "k"),
    "with a walrus": ("print(x := use(x))\nuse(y := k)", "xyk"),
    "in a test by a walrus": ("if (y := x) is None:\n    pass", "xy"),
    "the iterable of a loop": ("for one in x:\n    print(one)", "x"),
    "an attribute": ("meter.value = x\nx.grad += y", "xy"),
    "an item of something else": ("queue[0] = x\nqueue.append(y)\nuse(queue)", "xy"),
    "for a meter": ("meter.update(x)\nmeter.write(y)\nz = meter.mean(z)", "xyz"),
    "for an object made later": ("later = Meter()\nprint(later.mean(x))", "x"),
    "initialised": ("init.ones_(x)", "x"),
    "drawn by": ("y = torch.rand(k)", "k"),
    "an output": ("y = torch.abs(z, out=x)", "xz"),
    "deleted": ("print(x)\ndel x", "x"),
    "asserted": ("assert x.sum() > 0", "x"),
    "raised": ("if flag:\n    raise ValueError(x)", "x"),
    "an imported name": ("import math as k\nprint(k)", "k"),
    "of a with": ("with use(y) as x:\n    print(x)", "xy"),
    "of an exception": ("try:\n    use()\nexcept ValueError as x:\n    print(x)", "x"),
    "matched": ("match x:\n    case [y]:\n        print(y)", "xy"),
    "read by itself": ("x.real", "x"),
    "by name": ("print(x, locals())", "xyzk"),
}


@pytest.mark.parametrize("case", USED)
def test_what_may_decide_the_training_is_not_found(tmp_path, case):
    body, names = USED[case]
    assert set(names) & set(only_printed(tmp_path, body)) == set()


def test_a_use_in_front_of_the_loop_counts(tmp_path):
    assert only_printed(tmp_path, "x += 1\ny += 1\nprint(x, y)", head="use(x)") == "kyz"


def test_a_returned_variable_is_not_found(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "def f(x):\n    y, z, k = 0, 0, 0\n    seen(x, y)\n    print(x, z)\n    return k"
    )
    seen = []
    see = {"seen": lambda *_: seen.append(what_names_reach(sys._getframe(1)).output)}
    runpy.run_path(str(path), see)["f"](1)
    assert seen == [{"z"}], "neither a parameter"


@pytest.mark.parametrize("name", ["<string>", "missing.py"])
def test_code_without_a_source_has_none(name):
    found = []
    see = {"seen": lambda: found.append(what_names_reach(sys._getframe(1)).output)}
    exec(compile("x = 0\nseen()\nprint(x)", name, "exec"), see)
    assert found == [set()]


def test_a_cell_of_a_notebook_has_none_since_others_share_its_variables():
    text, found = "x = 0\nseen()\nprint(x)\n", []
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(keepends=True), "<cell 1>")
    see = {"seen": lambda: found.append(what_names_reach(sys._getframe(1)).output)}
    try:
        exec(compile(text, "<cell 1>", "exec"), see)
    finally:
        del linecache.cache["<cell 1>"]
    assert found == [set()]


TRAINING = {
    "a number in the loss": ("loss = x.sum() * k\nloss.backward()", "xk"),
    "by way of other names": ("y = z - k\nx = model(y)\nx.sum().backward()", "xyzk"),
    "backward of a tool": ("y = x * k\nmeter.backward(y)", "xyk"),
    "an argument of a function that trains": ("train(k)", "k"),
    "a bound of gradients": ("k = max(x)\nnn.utils.clip_grad_norm_(y, k)", "xyk"),
    "a sum of losses": ("y += x.sum().item()\nx.sum().backward()", "x"),
    "a count of steps": ("k += 1\nif k % 6 == 0:\n    use()", "k"),
    "a count of prints": ("k += 1\nif k % 6 == 0:\n    print(x)\n    y = 0", ""),
    "a count of logged lines": ("k += 1\nif k % 6 == 0:\n    logger.info(x)", ""),
    "a best score": ("if k > 3:\n    use()", ""),
}


@pytest.mark.parametrize("case", TRAINING)
def test_a_number_reaches_training_by_a_loss_or_as_a_count_of_steps(tmp_path, case):
    body, names = TRAINING[case]
    assert set(reached(tmp_path, body, kind="training")) == set(names)
