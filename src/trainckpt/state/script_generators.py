"""Keep random generators that a script holds in variables.

A training loop may draw from `rng = numpy.random.default_rng(0)` at the top of the script or in its
main function. No tracked object holds it, so a snapshot saves its state under the variable's name:
`script.rng` or `script.main.rng`. The resume restores it with the global generators, last of all.
So it is for those inside a variable's object, if its class or function belongs to the script:
`script.settings.rng`.

Variables are those of the `__main__` module and of its functions on the call stack. Only the main
thread has that stack. Generators that tracked loaders, models and callbacks hold are left to them.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from trainckpt.data import randomness

if TYPE_CHECKING:
    from types import FrameType

    from trainckpt.state.captured import Captured, Saved
    from trainckpt.state.registry import Registry

PART = "script generators"  # no keyword can be spelled so
SCRIPT = "script"  # the name of its own variables


def capture(registry: Registry, out: Captured) -> None:
    """Add the state of every generator in a variable of the script."""
    if states := randomness.capture(variables(registry)):
        out.values[PART] = out.encode(states, PART)


def restore(registry: Registry, saved: Saved) -> None:
    """Restore the generators in the script's variables; `lost` names the others."""
    randomness.restore(variables(registry), _states(saved), "the script")


def lost(registry: Registry, saved: Saved) -> list[str]:
    """Return the saved names whose generator is missing or of another kind, after `restore`."""
    live = randomness.capture(variables(registry))
    return sorted(name for name, state in _states(saved).items() if live.get(name) != state)


def _states(saved: Saved) -> dict[str, bytes]:
    tree = saved.values.get(PART)
    return {} if tree is None or not saved.is_own else saved.decode(tree)


def scopes() -> list[tuple[str, dict[str, Any]]]:
    """Return name and variables of the script, and of its functions on the main thread's stack."""
    if threading.current_thread() is not threading.main_thread():
        return []
    functions = [(name, frame.f_locals) for name, frame in frames() if name != SCRIPT]
    return [(SCRIPT, vars(sys.modules["__main__"])), *functions]


def frames() -> list[tuple[str, FrameType]]:
    """Return name and frame of the script's code on the main thread's stack, outermost first."""
    if threading.current_thread() is not threading.main_thread():
        return []
    script, stack = vars(sys.modules["__main__"]), []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is script:
            stack.append(frame)
        frame = frame.f_back
    found, calls = [], Counter[str]()
    for each in reversed(stack):
        function = each.f_code.co_name
        again = calls[function] or ""  # a function that calls itself
        calls[function] += 1
        name = SCRIPT if function == "<module>" else f"{SCRIPT}.{function}{again}"
        found.append((name, each))
    return found


def variables(registry: Registry) -> dict[str, Any]:
    """Return name -> generator; one object has one name, that of the outermost variable."""
    named = randomness.find_own(
        {
            f"{scope}.{name}": value
            for scope, names in scopes()
            for name, value in list(names.items())
            if not name.startswith("__")
        }
    )
    if not named:
        return {}
    seen = {id(generator) for generator in registry.watched.generators().values()}
    seen.update(map(id, randomness.find(_roots(registry))))
    return {name: generator for name, generator in named.items() if id(generator) not in seen}


def _roots(registry: Registry) -> dict[str, Any]:
    return {state.name: state.loader.underlying for state in registry.loaders}
