"""Every optimizer and scheduler of torch, with each of its switches, resumes exactly: three ways.

An uninterrupted training and a resumed one are equal to the last bit. A cold one, with the saved
weights and a new optimizer, is another one, or the comparison would show nothing.

The classes and their switches are read from torch, so a new one is tried without a line here, and
the tables of docs/optimizers.md are compared with the cases.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from tests.long_cases import long
from tests.state.helpers import frozen, registry, saved_of
from tests.state.optimizer_programs import Net, Words, state_of, step
from trainckpt.state import apply

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/optimizers.md"
STOP, END = 3, 6


def classes(modules, base):
    """Subclasses of `base` that these modules show, by name."""
    found = [value for module in modules for value in vars(module).values()]
    are_public = [one for one in found if inspect.isclass(one) and not one.__name__.startswith("_")]
    return {one.__name__: one for one in are_public if issubclass(one, base) and one is not base}


# ---- the optimizers

OPTIMIZERS = classes([torch.optim], torch.optim.Optimizer)
# Where the default has little state, or is too slow to change a bfloat16 weight.
OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"momentum": 0.9},
    "Adagrad": {"lr_decay": 0.01},
    "Adadelta": {"lr": 0.5},
    "LBFGS": {"lr": 0.1, "max_iter": 3, "history_size": 2, "line_search_fn": "strong_wolfe"},
}
SPARSE = ["Adagrad", "SGD", "SparseAdam"]  # the others refuse sparse gradients
LAYOUTS = {
    "contiguous": {},
    "bfloat16": {"dtype": torch.bfloat16},
    # Fused kernels walk moments and gradients as they lie in memory.
    "channels_last": {"memory_format": torch.channels_last},
}


def switches(kind):
    """Options of an optimizer that are off, and can be switched on."""
    known = inspect.signature(kind).parameters.values()
    off = {p.name for p in known if p.default is False or p.name in ("foreach", "fused")}
    return sorted(off - {"differentiable"})  # steps inside autograd, on no parameters


def takes_a_tensor(kind):
    return "Tensor" in str(inspect.signature(kind).parameters["lr"].annotation)


def ways(name):
    """The ways in which an optimizer is tried, each by itself."""
    kind = OPTIMIZERS[name]
    if name == "SparseAdam":
        return ["sparse gradients", "tensor lr", *switches(kind)]
    found = [*LAYOUTS, *switches(kind)]
    if name == "LBFGS":
        found.remove("channels_last")  # it views each gradient as one row
    found += ["tensor lr"] if takes_a_tensor(kind) else []
    return found + (["sparse gradients"] if name in SPARSE else [])


def build(name, way):
    """A model, and this optimizer of its parameters."""
    options = {"lr": 0.05, **OPTIONS.get(name, {})}
    if way in switches(OPTIMIZERS[name]):
        options[way] = True
    if way == "tensor lr":
        options["lr"] = torch.tensor(options["lr"])
    is_sparse = way == "sparse gradients" or name == "SparseAdam"
    model = Words() if is_sparse else Net(**LAYOUTS.get(way, {}))
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    return model, OPTIMIZERS[name](parameters, **options)


class Training:
    """A model and its optimizer, whose learning rate the loop halves once."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def tracked(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, number):
        if number == 2:
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] *= 0.5
        return step(self.model, self.optimizer, number)

    def state(self):
        return state_of(self.model, self.optimizer)


def resumes_exactly(make):
    """Train three ways: uninterrupted, stopped and resumed, and cold."""

    def made(seed):
        torch.manual_seed(seed)
        return make()

    straight, stopped, resumed, cold = made(0), made(0), made(1), made(2)
    losses = [straight.train(number) for number in range(END)]
    assert [stopped.train(number) for number in range(STOP)] == losses[:STOP]
    source, target = registry(**stopped.tracked()), registry(**resumed.tracked())
    source.add_implied()
    target.add_implied()
    saved = saved_of(source)
    apply.check(target, saved, "s3~1.1")
    apply.apply(target, saved)
    assert resumed.state() == stopped.state()
    cold.model.load_state_dict(stopped.model.state_dict())
    assert [resumed.train(number) for number in range(STOP, END)] == losses[STOP:]
    assert resumed.state() == straight.state()
    for number in range(STOP, END):
        cold.train(number)
    assert frozen(dict(cold.model.state_dict())) != frozen(dict(straight.model.state_dict()))


CASES = [(name, way) for name in OPTIMIZERS for way in ways(name)]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_an_optimizer_of_torch_resumes_exactly(name, way, monkeypatch):
    if way == "capturable":  # torch asks for its devices; the code needs neither graph nor GPU
        monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
    resumes_exactly(lambda: Training(*build(name, way)))


# ---- the schedulers

SCHEDULERS = classes([lr_scheduler, swa_utils], lr_scheduler.LRScheduler)


class Decay:
    """A function of a schedule that counts its calls: LambdaLR keeps an object's attributes."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return 0.9**self.calls


def sequence(o):
    parts = [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    return lr_scheduler.SequentialLR(o, parts, [2])


def sequence_in_sequence(o):
    parts = [sequence(o), lr_scheduler.CosineAnnealingLR(o, 3)]
    return lr_scheduler.SequentialLR(o, parts, [4])


def chain(o):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)], o
    )


def sequence_and_chain_in_chain(o):
    return lr_scheduler.ChainedScheduler([sequence(o), chain(o)], o)


MAKERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, [Decay(), Decay()]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 1 - n / 10),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2"),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Decay()),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], END),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": sequence,
    "SequentialLR in SequentialLR": sequence_in_sequence,
    "ChainedScheduler": chain,
    "ChainedScheduler of SequentialLR and ChainedScheduler": sequence_and_chain_in_chain,
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=4),
}
RATES = {"number lr": float, "tensor lr": torch.tensor}


class Scheduled:
    """A model, SGD with two groups, and a scheduler that moves rates, and momentum if it can."""

    def __init__(self, make, rate):
        self.model = Net()
        groups = [
            {"params": list(self.model.conv.parameters()), "lr": rate(0.1)},
            {"params": list(self.model.head.parameters()), "lr": rate(0.02)},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.scheduler = make(self.optimizer)

    def tracked(self):
        return vars(self)

    def train(self, number):
        loss = step(self.model, self.optimizer, number)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(float.fromhex(loss))
        else:
            self.scheduler.step()
        return loss, [float(group["lr"]) for group in self.optimizer.param_groups]

    def state(self):
        return state_of(self.model, self.optimizer), float_rates(self.scheduler)


def float_rates(scheduler):
    return [float(rate) for rate in scheduler.get_last_lr()]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", sorted({*SCHEDULERS, *MAKERS}))
def test_a_scheduler_of_torch_resumes_exactly(name, rate):
    if name not in MAKERS:
        pytest.fail(f"torch has a scheduler {name}: add it to MAKERS and docs/optimizers.md")
    resumes_exactly(lambda: Scheduled(MAKERS[name], RATES[rate]))


# ---- optimizers of other libraries, and wrappers


class Sharpness(torch.optim.Optimizer):
    """SAM: up to the worst point nearby, and the step of a base optimizer by the gradient there."""

    def __init__(self, parameters, base, **options):
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (0.05 / norm))
        with torch.enable_grad():
            closure()
        for p in parameters:
            p.copy_(self.state[p]["before"])
        self.base_optimizer.step()


class Sharp(Training):
    def train(self, number):
        def loss():
            self.optimizer.zero_grad()
            value = self.model(number).square().sum()
            value.backward()
            return value

        first = loss().item().hex()
        self.optimizer.step(loss)
        return first


class Free(Training):
    """A schedule-free optimizer: to be told that it trains."""

    def train(self, number):
        self.optimizer.train()
        return super().train(number)


def sam(model):
    return Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def tensor_betas(model):
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    return torch.optim.Adam(model.parameters(), 0.05, betas=betas, foreach=False)


def frozen_groups(model):
    model.head.requires_grad_(requires_grad=False)
    return torch.optim.AdamW(model.parameters(), 0.05)


def of(package, name, **options):
    """Make an optimizer of another library."""

    def make(model):
        return getattr(pytest.importorskip(package), name)(model.parameters(), **options)

    return make


OTHERS = {
    "SAM around SGD": (sam, Sharp),
    "Adam, betas in tensors": (tensor_betas, Training),
    "AdamW, some parameters frozen": (frozen_groups, Training),
    "schedulefree.AdamWScheduleFree": (of("schedulefree", "AdamWScheduleFree", lr=0.05), Free),
    "schedulefree.RAdamScheduleFree": (of("schedulefree", "RAdamScheduleFree", lr=0.05), Free),
    "schedulefree.SGDScheduleFree": (of("schedulefree", "SGDScheduleFree", lr=0.1), Free),
    "lion_pytorch.Lion": (of("lion_pytorch", "Lion", lr=0.01), Training),
    "prodigyopt.Prodigy": (of("prodigyopt", "Prodigy", d_coef=0.5), Training),
    "transformers.Adafactor": (
        of("transformers", "Adafactor", lr=0.01, relative_step=False),
        Training,
    ),
}
PACKAGES = ("lion_pytorch", "prodigyopt", "transformers")


@pytest.mark.parametrize(
    "name", [one for n in OTHERS for one in (long(n) if n.startswith(PACKAGES) else [n])]
)
def test_an_optimizer_of_another_library_resumes_exactly(name):
    make, training = OTHERS[name]

    def made():
        model = Net()
        return training(model, make(model))

    resumes_exactly(made)


# ---- the page


def rows_of(heading):
    """The cells of the table below a heading of docs/optimizers.md."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip(" `") for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


def test_the_page_lists_what_is_tried():
    """To be added after another release of torch: the rows that the assertion shows."""
    ours = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[
        1
    ]
    if not torch.__version__.startswith(f"{ours}."):
        pytest.skip(f"the page is about torch {ours}")
    assert f"Tried with torch {ours} " in PAGE.read_text(encoding="utf-8")
    expected = [[name, ", ".join(ways(name))] for name in sorted(OPTIMIZERS)]
    assert rows_of("Optimizers of torch") == expected
    assert rows_of("Schedulers of torch") == [[name, ", ".join(RATES)] for name in sorted(MAKERS)]
    assert [row[0] for row in rows_of("Other optimizers")] == list(OTHERS)


def test_every_test_that_the_page_names_exists():
    for _, path, name in rows_of("What else an optimizer meets"):
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), (path, name)
