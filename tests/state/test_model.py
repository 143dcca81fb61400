"""Models come back bit for bit, whatever their tensors are; differences are named, all at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.state.helpers import bits, frozen, move, registry, saved_of
from trainckpt.errors import StateMismatch
from trainckpt.state import apply
from trainckpt.state.capture import capture
from trainckpt.state.values import UnknownValue

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
]


class Holder(nn.Module):
    """Buffers, given by name."""

    def __init__(self, **buffers):
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def noise(dtype, *shape):
    """Any bits of the type (for bool: its two)."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8)
    return raw[..., 0] > 127 if dtype is torch.bool else raw.view(dtype).squeeze(-1)


def there_and_back(model, other):
    move(registry(model=model), registry(model=other))
    assert frozen(dict(other.named_buffers())) == frozen(dict(model.named_buffers()))
    assert frozen(dict(other.named_parameters())) == frozen(dict(model.named_parameters()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_of_every_type_and_size_come_back(dtype):
    torch.manual_seed(0)
    shapes = [(), (0,), (3, 0, 2), (1,), (5, 3)]
    there_and_back(
        Holder(**{f"b{i}": noise(dtype, *shape) for i, shape in enumerate(shapes)}),
        Holder(**{f"b{i}": torch.zeros(shape, dtype=dtype) for i, shape in enumerate(shapes)}),
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:, 1:],
        lambda t: t.flip(0),
        lambda t: t[None, :, :, None].contiguous(memory_format=torch.channels_last),
    ],
)
def test_views_come_back_and_stay_views(view):
    base, other = torch.randn(4, 6), torch.zeros(4, 6)
    buffer = view(other)
    there_and_back(Holder(b=view(base)), Holder(b=buffer))
    if buffer.data_ptr() == other.data_ptr():
        assert torch.equal(view(other), view(base))


def test_an_expanded_buffer_comes_back():
    there_and_back(Holder(b=torch.tensor([3.0]).expand(4)), Holder(b=torch.zeros(1).expand(4)))


def test_conjugated_and_negated_views_come_back_by_value():
    held = torch.randn(3, dtype=torch.complex64)
    model, other = (
        Holder(b=held.conj(), c=held.conj().imag),
        Holder(b=torch.zeros(3, dtype=torch.complex64), c=torch.zeros(3)),
    )
    move(registry(model=model), registry(model=other))
    assert torch.equal(other.b, held.conj().resolve_conj())
    assert torch.equal(other.c, -held.imag)


def views(dtype):
    """A model of a conjugated parameter and conjugated, negated and expanded buffers."""
    held = torch.randn(40, 40, dtype=dtype)
    model = Holder(
        conj=torch.randn(40, 40, dtype=dtype).conj(),
        neg=torch.randn(40, 40, dtype=dtype).conj().imag,
        both=torch.randn(1, 3, dtype=dtype).conj().expand(5, 3),
    )
    model.weight = nn.Parameter(held.mH)
    return model


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_what_the_script_made_as_conjugated_or_negated_views_gets_the_saved_values(dtype):
    torch.manual_seed(0)
    model, other, plain = views(dtype), views(dtype), views(dtype)
    for name, buffer in list(plain.named_buffers()):  # the bits are not the values
        plain.register_buffer(name, buffer.resolve_conj().resolve_neg().clone())
    plain.weight = nn.Parameter(plain.weight.detach().resolve_conj().clone())
    for source, target in [(model, other), (other, plain), (plain, model)]:
        want = {name: tensor.clone() for name, tensor in source.state_dict().items()}
        is_conj = target.weight.is_conj(), target.conj.is_conj(), target.neg.is_neg()
        move(registry(model=source), registry(model=target))
        assert all(torch.equal(target.state_dict()[name], want[name]) for name in want)
        assert (target.weight.is_conj(), target.conj.is_conj(), target.neg.is_neg()) == is_conj
        with torch.no_grad():
            for tensor in (target.weight, target.conj, target.neg):
                tensor.mul_(3)


class Kitchen(nn.Module):
    """Batch norm, tied weights, a buffer that is not persistent, and state of its own."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.unused = nn.Parameter(torch.randn(2), requires_grad=False)
        self.seen = {"words": 0}

    def forward(self, x):
        self.seen["words"] += x.numel()
        self.scratch += 1
        return self.head(self.norm(self.words(x)))

    def get_extra_state(self):
        return {"seen": dict(self.seen), "tensor": self.scratch * 2}

    def set_extra_state(self, state):
        self.seen = state["seen"]
        self.extra_tensor = state["tensor"]


def test_everything_a_module_can_hold_comes_back():
    torch.manual_seed(0)
    model, other = Kitchen(), Kitchen()
    model(torch.randint(0, 7, (9,))).sum().backward()
    move(registry(model=model), registry(model=other))
    assert frozen(dict(other.state_dict())) == frozen(dict(model.state_dict()))
    assert other.seen == {"words": 9}
    assert torch.equal(other.scratch, model.scratch)
    assert torch.equal(other.extra_tensor, model.scratch * 2)
    assert frozen({n: p.grad for n, p in other.named_parameters()}) == frozen(
        {n: p.grad for n, p in model.named_parameters()}
    )


def test_tied_weights_stay_tied_and_are_stored_once():
    model, other = Kitchen(), Kitchen()
    stored = saved_of(registry(model=model)).tensors
    assert "model/words.weight" in stored
    assert "model/head.weight" not in stored
    move(registry(model=model), registry(model=other))
    assert other.head.weight is other.words.weight
    assert torch.equal(other.head.weight, model.words.weight)


def test_ties_that_are_gone_are_refused():
    model, other = Kitchen(), Kitchen()
    other.head.weight = nn.Parameter(model.words.weight.clone())
    assert differences(model, other) == [
        "model/head.weight is new: the snapshot has no such tensor"
    ]


def test_storage_is_kept_so_whatever_shares_it_goes_on_sharing_it():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    held = other.weight.detach()
    there_and_back(model, other)
    assert torch.equal(held, model.weight)


def differences(model, other):
    with pytest.raises(StateMismatch) as caught:
        apply.check(registry(model=other), saved_of(registry(model=model)), "s0~1.1")
    return list(caught.value.differences)


def test_every_difference_is_named_at_once_and_nothing_is_changed():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(2)})
    other = nn.ModuleDict(
        {"a": nn.Linear(2, 4), "c": nn.BatchNorm1d(2).half(), "d": nn.Linear(1, 1)}
    )
    before = frozen(dict(other.state_dict()))
    found = differences(model, other)
    assert len(found) == 10
    assert "model/a.weight has shape [3, 2] in the snapshot, [4, 2] now" in found
    assert "model/b.bias is gone: only the snapshot has it" in found
    assert "model/c.running_var is torch.float32 in the snapshot, torch.float16 now" in found
    assert "model/d.weight is new: the snapshot has no such tensor" in found
    assert frozen(dict(other.state_dict())) == before


def test_a_compiled_part_has_the_same_names_as_a_plain_one():
    """torch.compile wraps what it compiles; a resume may do without it, or with."""

    class Compiled(nn.Module):  # as torch.compile wraps, without compiling
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

    model, plain = nn.Sequential(Kitchen()), nn.Sequential(Kitchen())
    model[0].seen["words"] = 5
    wrapped = nn.Sequential(Compiled(Kitchen()))
    move(registry(model=model), registry(model=wrapped))
    assert wrapped[0]._orig_mod.seen == {"words": 5}
    move(registry(model=wrapped), registry(model=plain))
    assert plain[0].seen == {"words": 5}
    assert torch.equal(plain[0].unused, model[0].unused)


class Pair(torch.Tensor):
    """A traceable subclass: a matrix kept as two tensors."""

    @staticmethod
    def __new__(cls, low, high):
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype)

    def __init__(self, low, high):
        self.low, self.high = low, high

    def __tensor_flatten__(self):
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Pair(args[0].low, args[0].high)
        raise NotImplementedError(func)


class Plain(torch.Tensor):
    """A subclass that says nothing of what it holds."""


def pair_model(seed):
    torch.manual_seed(seed)
    return Holder(b=Pair(torch.randn(2, 2), torch.randn(2, 2)))


def test_a_tensor_subclass_that_shows_its_inner_tensors_comes_back_by_them():
    model, other = pair_model(0), pair_model(1)
    saved = move(registry(model=model), registry(model=other))
    assert {"model/b#low", "model/b#high"} <= saved.tensors.keys()
    assert bits(other.b.low) == bits(model.b.low)
    assert bits(other.b.high) == bits(model.b.high)


def test_a_tensor_subclass_that_does_not_is_refused_by_name():
    with pytest.raises(UnknownValue, match=r"model/b is a .*Plain"):
        capture(registry(model=Holder(b=torch.zeros(2).as_subclass(Plain))))


def without_memory():
    model = Holder(b=torch.randn(4))
    model.b.untyped_storage().resize_(0)
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (without_memory, "model/b has no memory"),
        (lambda: nn.LazyLinear(3), "model/weight is a lazy parameter"),
        (lambda: nn.LazyBatchNorm1d(), "lazy parameter"),
        (lambda: nn.Linear(2, 2, device="meta"), "model/weight is a meta tensor"),
        (lambda: Holder(b=torch.eye(2).to_mkldnn()), "model/b is a torch._mkldnn tensor"),
    ],
)
def test_what_has_no_bytes_to_copy_is_refused_by_name(build, words):
    with pytest.raises(UnknownValue, match=words):
        capture(registry(model=build()))


def test_a_lazy_module_is_taken_after_its_first_forward():
    model, other = nn.LazyLinear(3), nn.LazyLinear(3)
    for lazy in (model, other):
        lazy(torch.randn(2, 5))
    there_and_back(model, other)


def test_swa_and_ema_averages_come_back():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=True)
    other, average2 = copy.deepcopy(model), copy.deepcopy(average)
    with torch.no_grad():
        for _ in range(3):
            model.weight += torch.randn(3, 3)
            average.update_parameters(model)
    move(registry(model=model, ema=average), registry(model=other, ema=average2))
    assert average2.n_averaged == 3
    assert frozen(dict(average2.state_dict())) == frozen(dict(average.state_dict()))


class Whitening(nn.Module):
    """A forward assigns its buffer anew, and what it assigns lies by columns."""

    def __init__(self, start=None):
        super().__init__()
        start = torch.eye(3, 5) if start is None else start
        self.register_buffer("w", start)
        self.register_buffer("same", start)
        self.register_buffer("c", torch.eye(2), persistent=False)

    def forward(self):
        self.w = self.same = torch.rand(5, 3).t()
        self.c = torch.rand(2, 2).t()


def test_a_buffer_lies_in_memory_as_it_did():
    source, target = Whitening(), Whitening()
    source()
    move(registry(model=source), registry(model=target))
    assert frozen(dict(target.named_buffers())) == frozen(dict(source.named_buffers()))
    assert target.w.stride() == (1, 3)
    assert target.w is target.same


def test_a_buffer_that_lay_by_rows_does_so_again():
    source, target = Whitening(), Whitening(torch.ones(5, 3).t())
    move(registry(model=source), registry(model=target))
    assert frozen(dict(target.named_buffers())) == frozen(dict(source.named_buffers()))
    assert target.w.stride() == (5, 1)


def test_a_buffer_with_gaps_stays_the_view_that_it_is():
    whole = torch.zeros(4, 6)
    source, target = Whitening(torch.rand(4, 3)), Whitening(whole[:, ::2])
    move(registry(model=source), registry(model=target))
    assert whole[:, ::2].equal(source.w)


SHELLS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]


@pytest.mark.parametrize("name", [name for name in SHELLS if hasattr(torch, name)])
@pytest.mark.parametrize("size", [9, 70_000])
def test_buffers_of_types_that_torch_cannot_copy_come_back(name, size):
    def build(fill):
        module = nn.Module()
        numbers = torch.full((size,), fill, dtype=torch.uint8)
        module.register_buffer("q", numbers.view(getattr(torch, name)))
        module.register_buffer("none", None)
        return module

    source, target = build(1), build(0)
    source.none = source.q.view(torch.uint8).clone().view(source.q.dtype)
    move(registry(model=source), registry(model=target))
    for found in (target.q, target.none):
        assert found.dtype == source.q.dtype
        assert found.view(torch.uint8).equal(source.q.view(torch.uint8))
