"""Tell variables that only reach the output from those that reach a loss, by the syntax tree.

Many loops keep a sum, a count or a confusion matrix that is only printed or logged. Such a variable
decides no training, so a resume need not warn of it. Three rules:

1. A name only reaches the output if each use of it prints or logs it (`_LOGGING`), changes it in
   place, or passes it on to a name that only reaches the output. Between may stand operators and
   calls that only compute (`_PURE`). All else is another use, and so is all that is not understood.
2. Names that may hold one object, or a part of it, all only reach the output or none does, if that
   object is changed in place: by `+=`, `name[i] = ...`, a method of `_IN_PLACE`, or one that ends
   with an underscore.
3. A name reaches training if it is passed on to `backward` or to the clipping of gradients, or to
   a function that calls one, or if it counts steps (`if step % n == 0: evaluate()`).

Parameters, imported names and names that an inner function mentions never only reach the output.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import nn

from trainckpt.data import randomness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOGGING = _words(
    "debug info warning error critical print log log_dict log_metric log_metrics write writerow "
    "writerows add_scalar add_scalars add_image add_images add_figure add_histogram add_text "
    "set_postfix set_postfix_str set_description set_description_str"
)
_TRAINING = _words("backward clip_grad_norm_ clip_grad_value_")
_IN_PLACE = _words("append appendleft extend insert update add clear fill")
_TORCH_IN_PLACE = re.compile("[^_].*_")  # by their names, which end with an underscore
_ANEW = _words(  # the result shares no memory with the arguments
    "item tolist clone deepcopy zeros ones full empty zeros_like ones_like full_like empty_like "
    "eye arange linspace tensor array bincount sum mean std var norm argmax count_nonzero"
)
_PURE = _ANEW | _words(
    "detach cpu numpy float double long int half bool to reshape view flatten squeeze unsqueeze t "
    "transpose permute diag diagonal trace max min amax amin median quantile argmin argsort "
    "abs sqrt exp log square round clamp clip maximum minimum nanmean cumsum stack cat concatenate "
    "vstack hstack size dim numel isnan isfinite any all nan_to_num softmax get keys values items "
    "most_common join format copy"
)
_PURE_BUILTINS = _words(
    "abs all any bool dict divmod enumerate float format int len list max min pow range repr "
    "reversed round set sorted str sum tuple zip"
)
_ANEW_BUILTINS = _words("bool float int len repr str format range")
_CONTAINERS = (list, dict, set, tuple, deque, Counter, OrderedDict, defaultdict)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, *_COMPREHENSIONS)  # or of lists: +
_NOT_PURE = (ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.NamedExpr)
_Names: TypeAlias = "frozenset[str | None]"
_UNKNOWN: _Names = frozenset((None,))
_NONE: _Names = frozenset()
_ANYTHING = ast.Yield()  # a value of which nothing is known


class Reached(NamedTuple):
    """The variables of a frame by what they reach.

    Attributes:
        output: Those that only reach the output.
        training: Those that reach a loss, or decide what is done at each n-th step.
    """

    output: set[str]
    training: set[str]


def what_names_reach(frame: types.FrameType) -> Reached:
    """Return what the frame's own variables reach; empty sets without its source."""
    try:
        scope = _scope(frame)
        if scope is not None:
            uses = _Uses(frame, scope)
            return Reached(uses.reaching_only_output(), uses.reaching_training())
    except (SyntaxError, ValueError, RecursionError, OSError):
        pass
    return Reached(set(), set())


def _scope(frame: types.FrameType) -> ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the tree of the code that the frame runs; None if it is not found, or not one."""
    code = frame.f_code
    linecache.checkcache(code.co_filename)
    tree = _parse("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    if code.co_name == "<module>":  # cells of a notebook share their variables: no whole file
        file = frame.f_globals.get("__file__")
        is_whole = file is not None and Path(file).absolute() == Path(code.co_filename).absolute()
        return tree if is_whole and tree.body else None
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        and node.name == code.co_name
        and min(part.lineno for part in (node, *node.decorator_list)) == code.co_firstlineno
    ]
    return functions[0] if len(functions) == 1 else None


@functools.lru_cache(maxsize=2)  # the script's functions are mostly in one file
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


class _Uses:
    """The uses of each name in a scope. A name None stands for what is not understood.

    Attributes:
        _flows: name -> names that its value is passed on to; None for any other use.
        _holds: name -> names whose object it may hold itself.
        _contains: name -> names whose objects may lie in its container.
        _changed: Names whose object is changed in place.
        _parts_changed: Names whose object's parts may be changed in place, as by `name[0] += 1`.
    """

    def __init__(
        self,
        frame: types.FrameType,
        scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef,
    ) -> None:
        self._frame, self._locals = frame, frame.f_locals
        self._flows = defaultdict[str, set[str | None]](set)
        self._holds = defaultdict[str, set[str | None]](set)
        self._contains = defaultdict[str, set[str | None]](set)
        self._changed, self._parts_changed = set[str](), set[str]()
        self._bound, self._excluded = set[str](), set[str]()
        self._files = set[str]()  # names of files that a `with` opens
        self._decides = set[str]()  # names of losses, and of counts of steps
        calls = [node for node in ast.walk(scope) if isinstance(node, ast.Call)]
        self._is_dynamic = any(map(self._reads_any_name, calls))
        if not isinstance(scope, ast.Module):
            self._excluded.update(n.arg for n in ast.walk(scope.args) if isinstance(n, ast.arg))
        for statement in scope.body:
            self._visit(statement)

    def reaching_only_output(self) -> set[str]:
        """Return the greatest set of names whose every use stays in it."""
        if self._is_dynamic:
            return set()
        self._spread_changes()
        names = self._bound - self._excluded
        while outside := {n for n in names if not self._flows[n] | self._shared(n) <= names}:
            names -= outside
        return names

    def reaching_training(self) -> set[str]:
        """Return the names that are passed on to a loss, or that count steps."""
        names, before = set[str](), set(self._decides)
        while before:
            names |= before
            before = {name for name, sinks in self._flows.items() if sinks & before} - names
        return names

    def _shared(self, name: str) -> set[str | None]:
        """Return the names whose object is changed where that of this name is."""
        shared = set(self._holds[name]) if name in self._changed else set()
        return shared | self._contains[name] if name in self._parts_changed else shared

    def _spread_changes(self) -> None:
        """Note a change of one name's object for the names that it was made from."""
        to_do = [*self._changed, *self._parts_changed]
        while to_do:
            for other in self._shared(to_do.pop()):
                if other is not None and not {other} <= self._changed & self._parts_changed:
                    self._changed.add(other)
                    self._parts_changed.add(other)
                    to_do.append(other)

    # ---- statements

    def _visit(self, node: ast.AST) -> None:
        """Note the uses of names in a statement, or in a part of one that is no expression."""
        if isinstance(node, ast.Expr):
            self._expression_statement(node.value)
        elif isinstance(node, ast.Assign):
            self._assign_all(node.targets, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._change(node.target, [node.value])
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            self._excluded.add(node.name)
            self._inner(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                self._is_dynamic |= alias.name == "*"
                self._excluded.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._use(node.iter)
            self._assign(node.target, _ANYTHING)
            for statement in (*node.body, *node.orelse):
                self._visit(statement)
        else:
            self._visit_any_other(node)

    def _visit_any_other(self, node: ast.AST) -> None:
        """Visit the statements inside; count as used each name in its expressions.

        Names that it binds in ways of its own, as `except` and `global` do, are left out.
        """
        if isinstance(node, (ast.If, ast.While)):
            counts = [part for part in ast.walk(node.test) if _is_remainder(part)]
            if counts and not all(map(self._only_prints, (*node.body, *node.orelse))):
                self._decides.update(name for count in counts for name in _names_in(count))
        bound = (getattr(node, "name", None), getattr(node, "rest", None))
        self._excluded.update(filter(None, (*bound, *getattr(node, "names", ()))))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._use(child)
            else:
                self._visit(child)
        if isinstance(node, ast.withitem) and node.optional_vars is not None:
            call = node.context_expr
            if isinstance(call, ast.Call) and self._builtin(call.func) == "open":
                self._files.update(_names_in(node.optional_vars))

    def _expression_statement(self, call: ast.expr) -> None:
        if not isinstance(call, ast.Call):
            self._use(call)
            return
        function, values = call.func, [*call.args, *(keyword.value for keyword in call.keywords)]
        if self._builtin(function) == "print":
            self._flow(values, _NONE)
        elif not isinstance(function, ast.Attribute) or self._trains(function):
            self._use(call)
        elif function.attr in _LOGGING and self._is_log(function.value):
            self._use(function.value)
            self._flow(values, _NONE)
        elif function.attr in _IN_PLACE or _TORCH_IN_PLACE.fullmatch(function.attr):
            self._change(function.value, values)
        else:
            self._use(call)

    def _only_prints(self, node: ast.stmt) -> bool:
        """Return True for `print(...)`, a call of a logging method, and for `name = constant`."""
        if isinstance(node, ast.Assign):
            return isinstance(node.value, ast.Constant)
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            return call.func.attr in _LOGGING
        return isinstance(call, ast.Call) and self._builtin(call.func) == "print"

    def _assign_all(self, targets: list[ast.expr], value: ast.expr) -> None:
        for target in targets:
            self._assign(target, value)
            if isinstance(target, ast.Name) and not isinstance(value, ast.Constant):
                value = target  # in `x = y = []` both hold one object

    def _assign(self, target: ast.expr, value: ast.expr, *, is_item: bool = False) -> None:
        """Note an assignment; with `is_item` of one item of the value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            values = _items(value, len(target.elts))
            for number, part in enumerate(target.elts):
                item = value if values is None else values[number]
                self._assign(part, item, is_item=is_item or values is None)
        elif isinstance(target, ast.Name):
            self._flow([value], frozenset((target.id,)))
            holds, contains = self._sources(value)
            if is_item and not isinstance(value, ast.Constant):
                holds, contains = holds | contains | _UNKNOWN, _UNKNOWN
            self._bound.add(target.id)
            self._holds[target.id] |= holds
            self._contains[target.id] |= contains
        elif isinstance(target, ast.Subscript):
            self._change(target.value, [value], key=target.slice)
        else:
            self._use(target)
            self._use(value)

    def _change(
        self, target: ast.expr, values: list[ast.expr], key: ast.expr | None = None
    ) -> None:
        """Note that a statement changes the object of the target in place by these values.

        `key`: where in the object.
        """
        keys, root = [key] if key is not None else [], target
        while isinstance(root, ast.Subscript):
            keys.append(root.slice)
            root = root.value
        if not isinstance(root, ast.Name):
            for part in (root, *keys, *values):
                self._use(part)
            return
        self._changed.add(root.id)
        if root is not target:
            self._parts_changed.add(root.id)
        self._flow([*keys, *values], frozenset((root.id,)))
        self._contains[root.id] |= _NONE.union(*(s for v in values for s in self._sources(v)))

    # ---- expressions

    def _use(self, node: ast.AST) -> None:
        """Count each name in an expression as used."""
        self._flow([node], _UNKNOWN)

    def _flow(self, nodes: Iterable[ast.AST], sinks: _Names) -> None:
        """Note that the names in these expressions are passed on to the sinks."""
        for node in nodes:
            if isinstance(node, ast.Name):
                self._flows[node.id] |= sinks
                if None in sinks and not isinstance(node.ctx, ast.Load):
                    self._excluded.add(node.id)
            elif isinstance(node, ast.Lambda):
                self._inner(node)
            elif isinstance(node, ast.NamedExpr):
                self._assign(node.target, node.value)
                self._flow([node.target, node.value], sinks)
            else:
                if isinstance(node, ast.Call) and self._trains(node.func):
                    self._decides.update(_names_in(node))
                is_use = not self._only_computes(node)
                self._flow(ast.iter_child_nodes(node), sinks | _UNKNOWN if is_use else sinks)

    def _inner(self, node: ast.AST) -> None:
        """Leave out each name that an inner function or class mentions."""
        for inner in ast.walk(node):
            if isinstance(inner, _SCOPES):
                self._excluded.update(_names_in(inner))

    def _only_computes(self, node: ast.AST) -> bool:
        """Return True if an expression does nothing but compute something of its parts."""
        if isinstance(node, ast.Call):
            return self._is_pure(node)
        if isinstance(node, (*_COMPREHENSIONS, ast.IfExp, ast.BoolOp)):  # they decide on a call
            parts = [part for part in ast.walk(node) if isinstance(part, (ast.Call, *_NOT_PURE))]
            return all(isinstance(part, ast.Call) and self._is_pure(part) for part in parts)
        return not isinstance(node, _NOT_PURE)

    def _is_pure(self, call: ast.Call) -> bool:
        """Return True for a call that only computes something of its arguments."""
        if any(keyword.arg in ("out", "key") for keyword in call.keywords):
            return False
        if not isinstance(call.func, ast.Attribute):
            return self._builtin(call.func) in _PURE_BUILTINS
        root = _root(call.func)
        value, arguments = self._value(root), (*call.args, *call.keywords)
        if isinstance(root, ast.Name) and value is None and any(map(_has_name, arguments)):
            return False  # of an object that is not there yet, and may be of any class
        return call.func.attr in _PURE and not _is_own(value)

    def _trains(self, function: ast.expr) -> bool:
        """Return True for calls of `_TRAINING`, and for functions of the script that have one."""
        called = function.attr if isinstance(function, ast.Attribute) else None
        if (function.id if isinstance(function, ast.Name) else called) in _TRAINING:
            return True
        if isinstance(function, ast.Attribute):
            value = getattr(type(self._value(function.value)), function.attr, None)
        else:
            value = self._value(function)
        return isinstance(value, types.FunctionType) and not _TRAINING.isdisjoint(
            value.__code__.co_names
        )

    def _reads_any_name(self, call: ast.Call) -> bool:
        name = self._builtin(call.func)
        return name in ("locals", "globals", "exec", "eval") or (name == "vars" and not call.args)

    def _builtin(self, node: ast.expr) -> str | None:
        """Return the name of a function of Python's own; None for any other."""
        if not isinstance(node, ast.Name) or not hasattr(builtins, node.id):
            return None
        is_hidden = node.id in self._frame.f_globals or node.id in self._frame.f_code.co_varnames
        return None if is_hidden or node.id in self._excluded | self._bound else node.id

    def _sources(self, node: ast.expr) -> tuple[_Names, _Names]:
        """Return the names whose object the value may be, and those that it may contain."""
        if isinstance(node, ast.Name):
            return (_NONE if self._builtin(node) else frozenset((node.id,))), _NONE
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            return _NONE.union(*self._sources(node.value)), _NONE
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            either = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            pairs = [self._sources(one) for one in either]
            return _NONE.union(*(a for a, _ in pairs)), _NONE.union(*(b for _, b in pairs))
        parts = self._put_in(node)
        if parts is None:
            return _UNKNOWN, _UNKNOWN
        return _NONE, _NONE.union(*(names for part in parts for names in self._sources(part)))

    def _put_in(self, node: ast.expr) -> Iterable[ast.expr] | None:
        """Return what a new object is made of: the parts of a container; None if not understood."""
        if isinstance(node, (ast.Constant, ast.Compare, ast.UnaryOp, ast.JoinedStr)):
            return ()
        if isinstance(node, _DISPLAYS):
            return [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        if not isinstance(node, ast.Call):
            return None
        builtin = self._builtin(node.func)
        if isinstance(node.func, ast.Attribute):
            makes_anew = node.func.attr in _ANEW and self._is_pure(node)
        else:
            makes_anew = builtin in _ANEW_BUILTINS
        if makes_anew:
            return ()
        made = self._value(node.func) if builtin is None else getattr(builtins, builtin)
        is_container = any(made is kind for kind in _CONTAINERS)
        return [*node.args, *(word.value for word in node.keywords)] if is_container else None

    # ---- values that are there already

    def _is_log(self, node: ast.expr) -> bool:
        """Return True for an open file, or an object of a package and not of the script."""
        if isinstance(node, ast.Name) and node.id in self._files:
            return True
        value = self._value(node)
        return value is not None and not _is_own(value)

    def _value(self, node: ast.expr) -> Any:
        """Return the present value of a name or of attributes of it; None if there is none."""
        if isinstance(node, ast.Name):
            return self._locals.get(node.id, self._frame.f_globals.get(node.id))
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value), "__dict__", {}).get(node.attr)
        return None


def _is_own(value: object) -> bool:
    """Return True for an object of a class of the script, a module of it, or a torch module."""
    if isinstance(value, types.ModuleType):
        return randomness.is_own_module(value.__name__)
    return randomness.is_own_module(type(value).__module__) or isinstance(value, nn.Module)


def _is_remainder(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def _root(node: ast.expr) -> ast.expr:
    """Return what attributes, items and methods are taken of, such as `a` in `a.b[0].sum()`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _items(value: ast.expr, number: int) -> list[ast.expr] | None:
    """Return the items of a tuple or list in the source, if they are so many; else None."""
    items = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    is_plain = not any(isinstance(item, ast.Starred) for item in items)
    return items if is_plain and len(items) == number else None


def _has_name(node: ast.AST) -> bool:
    return any(True for _ in _names_in(node))


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that are read or bound anywhere in a tree."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, (ast.Global, ast.Nonlocal)):
            yield from each.names
