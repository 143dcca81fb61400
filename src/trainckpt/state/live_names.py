"""Find the variables whose present values running code may still read, by its bytecode.

A variable is live if some path from the current instruction reads it before any instruction writes
it. `hidden` in `out, hidden = model(x, hidden)` is live at the next batch, and the `x` of
`for x in batches` is not. A variable that a function made earlier reads, as a global or from its
closure, is live too: any call may run that function.

A call of `load_state_dict` on a variable writes it: its own content does not matter any more. A
call of `append` or `extend` reads nothing: a list that is only appended to decides no training.
That holds in inner functions too, and without the source. `output_names` has the rule for all
methods that change an object in place.

A `for` that is about to take its next item goes on in its body. Handlers of exceptions count, but
not the way on behind a `with` that suppresses them.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import re
import types
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# Python 3.13 and later also join two of them, as in STORE_FAST_LOAD_FAST
_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(FAST|NAME|GLOBAL|DEREF|CLOSURE)(_AND_CLEAR)?")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_COLLECTS = ("append", "extend")
_WITH = ("SETUP_WITH", "SETUP_ASYNC_WITH")


def live_names(frame: types.FrameType) -> set[str]:
    """Return the names of the frame's own variables that are live; of a module, its globals."""
    code, steps = frame.f_code, list(dis.get_instructions(frame.f_code))
    current = max((i for i, step in enumerate(steps) if step.offset <= frame.f_lasti), default=0)
    is_module = not code.co_flags & inspect.CO_OPTIMIZED
    flow = _Flow(code, steps)
    after = flow.after_current(current)
    reached = flow.reachable(after)
    accesses = [
        _access(step, next_, is_module=is_module)
        for step, next_ in zip(steps, [*steps[1:], None], strict=True)
    ]
    found = flow.live(after, accesses)
    for i, step in enumerate(steps):  # functions made before
        if i not in reached and isinstance(step.argval, types.CodeType):
            found |= _outer_read(step.argval, "LOAD_GLOBAL" if is_module else "LOAD_DEREF")
    return found


class _Access(NamedTuple):
    """The names that one instruction reads, then those that it writes."""

    reads: frozenset[str]
    writes: frozenset[str]


def _access(
    step: dis.Instruction, following: dis.Instruction | None, *, is_module: bool
) -> _Access:
    if isinstance(step.argval, types.CodeType):  # a function is made here
        return _Access(
            frozenset(_outer_read(step.argval, "LOAD_GLOBAL") if is_module else ()), frozenset()
        )
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    reads, writes = set[str](), set[str]()
    for (verb, place, is_restored), name in zip(_ACCESS.findall(step.opname), names, strict=False):
        if is_restored or (place == "GLOBAL" and not is_module):
            continue
        if verb != "LOAD":
            writes.add(name)
        elif name not in writes:
            reads.add(name)
    method = following.argval if following is not None and len(names) == 1 else None
    if method == "load_state_dict":
        reads, writes = set(), reads
    elif method in _COLLECTS:
        reads = set()
    return _Access(frozenset(reads), frozenset(writes))


def _outer_read(code: types.CodeType, load: str) -> set[str]:
    """Return the outer variables that a function reads, and those of the functions inside it.

    `load`: "LOAD_GLOBAL", or "LOAD_DEREF" for those of its closure.
    """
    steps = list(dis.get_instructions(code))
    found = {
        step.argval
        for step, following in itertools.pairwise(steps)
        if step.opname == load and following.argval not in _COLLECTS
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _outer_read(inner, load)
    return found if load == "LOAD_GLOBAL" else found.intersection(code.co_freevars)


class _Flow:
    """The ways through the instructions of a code object, by their numbers."""

    def __init__(self, code: types.CodeType, steps: list[dis.Instruction]) -> None:
        self._steps = steps
        self._at = {step.offset: i for i, step in enumerate(steps)}
        self._handlers: list[list[int]] = [[] for _ in steps]
        for first, end, target in self._protected(code):
            for i in range(first, end):
                self._handlers[i].append(target)
        self._successors = [self._after(i) for i in range(len(steps))]

    def _protected(self, code: types.CodeType) -> Iterator[tuple[int, int, int]]:
        """Yield the first instruction, the end and the handler of each protected range."""
        for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
            ends = (i for i, step in enumerate(self._steps) if step.offset >= entry.end)
            end = next(ends, len(self._steps))
            target = self._at[entry.target]
            near = self._steps[target : target + 2]
            if all(step.opname != "WITH_EXCEPT_START" for step in near):
                yield self._at[entry.start], end, target

    def _after(self, i: int) -> list[int]:
        """Return the instructions that may follow this one."""
        step, found = self._steps[i], list(self._handlers[i])
        is_jump = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        if is_jump and step.argval in self._at and step.opname not in _WITH:
            found.append(self._at[step.argval])
        always_jumps = step.opname.startswith("JUMP") and not step.opname.startswith("JUMP_IF")
        if step.opname not in _ENDS and not always_jumps and i + 1 < len(self._steps):
            found.append(i + 1)
        return found

    def after_current(self, i: int) -> list[int]:
        """Return what follows the instruction that runs now; of a `for`, its body."""
        if self._steps[i].opname.startswith("FOR_ITER"):
            return [i + 1, *self._handlers[i]]
        return self._successors[i]

    def reachable(self, starts: list[int]) -> set[int]:
        """Return the instructions that may run from here on."""
        found, to_do = set[int](), list(starts)
        while to_do:
            if (i := to_do.pop()) not in found:
                found.add(i)
                to_do += self._successors[i]
        return found

    def live(self, starts: list[int], accesses: list[_Access]) -> set[str]:
        """Return the names that are read before they are written on some path from `starts`."""
        before = [access.reads for access in accesses]
        has_changed = True
        while has_changed:
            has_changed = False
            for i in reversed(range(len(accesses))):
                after = frozenset[str]().union(*(before[j] for j in self._successors[i]))
                names = accesses[i].reads | (after - accesses[i].writes)
                if names != before[i]:
                    before[i], has_changed = names, True
        return set().union(*(before[i] for i in starts))
