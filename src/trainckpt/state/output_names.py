"""Tell variables that only reach the output from those that reach a loss, by the syntax tree.

Many loops keep a sum, a count or a confusion matrix that is only printed or logged. Such a variable
decides no training, so a resume need not warn of it. A number reaches a loss if it is passed on, by
assignments, to a name of which `backward` is called, or to a function that calls it. A count of
steps decides what is done at each n-th one (`if step % n == 0: evaluate()`).

A name only reaches the output if each use of it is one of these:

printed         in `print(...)`, or in a call of a logging method (`_LOGGING`) as a statement
changed         it is the target of `+=`, of `name[i] = ...`, or, as a statement, of a method that
                changes it in place: one of `_IN_PLACE`, or one that ends with an underscore
passed on       in the value of an assignment to names of the set, or of such a change of one

Between a name and the statement may stand operators and calls that only compute (`_PURE`). Any
other use counts: tests of `if` and `while`, iterables of `for`, `return`, attributes of objects,
and arguments of all other calls. So does all that is not understood.

Two names may hold one object (`b = a`). If one of them is changed, both are in the set or neither.
Parameters, imported names and names that an inner function mentions are never in it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import types
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
_IN_PLACE = _words("append appendleft extend insert update add clear fill")
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
_PLAIN = (  # expressions that hand on what their parts compute
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.JoinedStr),
    *(ast.FormattedValue, ast.Subscript, ast.Slice, ast.Attribute, ast.Constant, ast.Starred),
    *(ast.Tuple, ast.List, ast.Dict, ast.Set, ast.keyword, ast.comprehension, *_COMPREHENSIONS),
    *(ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context),
)
_Names = frozenset[str | None]
_UNKNOWN: _Names = frozenset((None,))
_NONE: _Names = frozenset()


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
            return Reached(uses.names(), uses.reaching_training())
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
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        and node.name == code.co_name
        and min(each.lineno for each in (node, *node.decorator_list)) == code.co_firstlineno
    ]
    return found[0] if len(found) == 1 else None


@functools.lru_cache(maxsize=2)  # the script's functions are mostly in one file
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


class _Uses:
    """The uses of each name in a scope.

    Attributes:
        _flows: name -> names that its value is passed on to; None for any other use.
        _holds: name -> names whose object it may hold itself; None for one not understood.
        _contains: name -> names whose objects may lie in its container; None as above.
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
        self._is_dynamic = any(self._reads_any_name(call) for call in calls)
        if not isinstance(scope, ast.Module):
            self._excluded.update(n.arg for n in ast.walk(scope.args) if isinstance(n, ast.arg))
        for statement in scope.body:
            self._statement(statement)

    def names(self) -> set[str]:
        """Return the greatest set of names whose every use stays in it."""
        if self._is_dynamic:
            return set()
        self._spread_changes()
        found = self._bound - self._excluded
        while True:
            kept = {name for name in found if self._stays(name, found)}
            if kept == found:
                return found
            found = kept

    def reaching_training(self) -> set[str]:
        """Return the names that are passed on to a loss, or that count steps."""
        found, to_do = set[str](), list(self._decides)
        before = defaultdict[str, set[str]](set)
        for name, sinks in self._flows.items():
            for sink in sinks:
                before[sink or ""].add(name)
        while to_do:
            if (name := to_do.pop()) not in found:
                found.add(name)
                to_do += before[name]
        return found

    def _stays(self, name: str, found: set[str]) -> bool:
        needs = set(self._flows[name])
        if name in self._changed:
            needs |= self._holds[name]
        if name in self._parts_changed:
            needs |= self._contains[name]
        return all(need is not None and need in found for need in needs)

    def _spread_changes(self) -> None:
        """Note a change of one name's object for the names that it was made from."""
        to_do, done = [*self._changed, *self._parts_changed], set[str]()
        while to_do:
            if (name := to_do.pop()) in done:
                continue
            done.add(name)
            others = set(self._holds[name]) if name in self._changed else set()
            if name in self._parts_changed:
                others |= self._contains[name]
            for other in others:
                if other is None:
                    continue
                if other not in self._changed or other not in self._parts_changed:
                    self._changed.add(other)
                    self._parts_changed.add(other)
                    done.discard(other)
                    to_do.append(other)

    # ---- statements

    def _statement(self, node: ast.stmt | ast.ExceptHandler) -> None:
        if isinstance(node, ast.Expr):
            self._expression_statement(node.value)
        elif isinstance(node, ast.Assign):
            self._assign(node.targets, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign([node.target], node.value)
        elif isinstance(node, ast.AugAssign):
            self._change(node.target, [node.value], "+=")
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            self._excluded.add(node.name)
            self._inner(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                self._is_dynamic |= alias.name == "*"
                self._excluded.add(alias.asname or alias.name.partition(".")[0])
        else:
            self._compound_statement(node)

    def _compound_statement(self, node: ast.stmt | ast.ExceptHandler) -> None:
        if isinstance(node, (ast.If, ast.While)):
            self._use(node.test)
            counts = [each for each in ast.walk(node.test) if _is_remainder(each)]
            if counts and not all(map(self._only_prints, [*node.body, *node.orelse])):
                self._decides.update(name for each in counts for name in _names_in(each))
            self._statements([*node.body, *node.orelse])
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._use(node.iter)
            self._bind(node.target, _NONE, _UNKNOWN, _UNKNOWN)
            self._statements([*node.body, *node.orelse])
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._with(item)
            self._statements(node.body)
        elif isinstance(node, ast.Try):
            self._statements([*node.body, *node.handlers, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.ExceptHandler):
            if node.type is not None:
                self._use(node.type)
            self._excluded.add(node.name or "")
            self._statements(node.body)
        else:
            self._other_statement(node)

    def _only_prints(self, node: ast.stmt) -> bool:
        """Return True for `print(...)`, a call of a logging method, and for `name = constant`."""
        if isinstance(node, ast.Assign):
            return isinstance(node.value, ast.Constant)
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            return call.func.attr in _LOGGING
        return isinstance(call, ast.Call) and self._builtin(call.func) == "print"

    def _statements(self, nodes: Iterable[ast.stmt | ast.ExceptHandler]) -> None:
        for node in nodes:
            self._statement(node)

    def _other_statement(self, node: ast.AST) -> None:
        """Count each name in it as used; those that it may bind are left out of the set."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                self._excluded.add(each.id)
            elif isinstance(each, (ast.Global, ast.Nonlocal)):
                self._excluded.update(each.names)
            elif isinstance(each, (ast.MatchAs, ast.MatchStar)):
                self._excluded.add(each.name or "")
            elif isinstance(each, ast.MatchMapping):
                self._excluded.add(each.rest or "")
        self._inner(node)

    def _with(self, item: ast.withitem) -> None:
        self._use(item.context_expr)
        if item.optional_vars is not None:
            names = set(_names_in(item.optional_vars))
            self._excluded.update(names)
            call = item.context_expr
            if isinstance(call, ast.Call) and self._builtin(call.func) == "open":
                self._files.update(names)

    def _expression_statement(self, node: ast.expr) -> None:
        if not isinstance(node, ast.Call):
            if not isinstance(node, ast.Constant):
                self._use(node)
            return
        function, values = node.func, [*node.args, *(keyword.value for keyword in node.keywords)]
        if self._builtin(function) == "print":
            self._flow(values, _NONE)
        elif not isinstance(function, ast.Attribute):
            self._use(node)
        elif function.attr in _LOGGING and self._is_log(function.value):
            self._use(function.value)
            self._flow(values, _NONE)
        elif function.attr in _IN_PLACE or (
            function.attr.endswith("_") and not function.attr.startswith("_")
        ):
            self._change(function.value, values, function.attr)
        else:
            self._use(node)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        if len(targets) == 1:
            pairs = _pairs(targets[0], value)
        else:
            pairs = [(target, value) for target in targets]
        several = frozenset(name for target in targets for name in _names_in(target))
        sinks = frozenset(sink for target, _ in pairs for sink in self._sinks(target))
        is_one_object = len(targets) > 1 and not isinstance(value, ast.Constant)
        for target, part in pairs:
            self._flow([part], sinks if len(targets) > 1 else self._sinks(target))
            holds, contains = self._sources(part)
            self._bind(target, part, holds | several if is_one_object else holds, contains)

    def _sinks(self, target: ast.expr) -> _Names:
        """Return the names that an assignment to this target passes a value on to."""
        if isinstance(target, (ast.Tuple, ast.List)):
            return frozenset(sink for each in target.elts for sink in self._sinks(each))
        return frozenset((_stored_in(target),))

    def _bind(
        self, target: ast.expr, value: ast.expr | _Names, holds: _Names, contains: _Names
    ) -> None:
        """Note what a target may hold from now on."""
        if isinstance(target, ast.Name):
            self._bound.add(target.id)
            self._holds[target.id] |= holds
            self._contains[target.id] |= contains
        elif isinstance(target, (ast.Tuple, ast.List)):
            inner = holds | contains | (_NONE if isinstance(value, ast.Constant) else _UNKNOWN)
            for each in target.elts:
                self._bind(each, value, inner, _UNKNOWN)
        elif isinstance(target, ast.Subscript) and isinstance(value, ast.expr):
            self._change(target, [value], "=")
        else:
            self._use(target)

    def _change(self, target: ast.expr, values: list[ast.expr], how: str) -> None:
        """Note that a statement changes the object of the target's name by these values."""
        name = _stored_in(target)
        if name is None:
            for each in (target, *values):
                self._use(each)
            return
        self._changed.add(name)
        if isinstance(target, ast.Subscript) and (
            how != "=" or isinstance(target.value, ast.Subscript)
        ):
            self._parts_changed.add(name)
        part: ast.expr = target
        while isinstance(part, ast.Subscript):
            self._flow([part.slice], frozenset((name,)))
            part = part.value
        self._flow(values, frozenset((name,)))
        for value in values:
            self._contains[name] |= frozenset().union(*self._sources(value))

    # ---- expressions

    def _use(self, node: ast.AST) -> None:
        """Count each name in an expression as used."""
        self._flow([node], _UNKNOWN)

    def _flow(self, nodes: Iterable[ast.AST], sinks: _Names) -> None:
        """Note that the names in these expressions are passed on to the sinks."""
        for node in nodes:
            if isinstance(node, ast.Name):
                self._flows[node.id] |= sinks
            elif isinstance(node, ast.Lambda):
                self._inner(node)
            elif isinstance(node, ast.NamedExpr):
                self._flow([node.value], sinks | {node.target.id})
                self._flow([node.target], sinks)
                self._bind(node.target, node.value, *self._sources(node.value))
            elif isinstance(node, ast.Call):
                if self._trains(node.func):
                    self._decides.update(_names_in(node))
                is_pure = self._is_pure(node)
                parts = [node.func, *node.args, *node.keywords]
                self._flow(parts, sinks if is_pure else sinks | _UNKNOWN)
            elif isinstance(node, (*_COMPREHENSIONS, ast.IfExp, ast.BoolOp)):
                whether = _NONE if self._is_all_pure(node) else _UNKNOWN  # they decide on a call
                self._flow(ast.iter_child_nodes(node), sinks | whether)
            elif isinstance(node, _PLAIN):
                self._flow(ast.iter_child_nodes(node), sinks)
            else:
                self._flow(ast.iter_child_nodes(node), _UNKNOWN)

    def _inner(self, node: ast.AST) -> None:
        """Leave out each name that an inner function or class mentions."""
        for inner in ast.walk(node):
            if isinstance(inner, _SCOPES):
                self._excluded.update(_names_in(inner))

    def _is_all_pure(self, node: ast.AST) -> bool:
        return all(
            isinstance(each, (*_PLAIN, ast.Name))
            or (isinstance(each, ast.Call) and self._is_pure(each))
            for each in ast.walk(node)
        )

    def _is_pure(self, call: ast.Call) -> bool:
        """Return True for a call that only computes something of its arguments."""
        if any(keyword.arg in ("out", "key") for keyword in call.keywords):
            return False
        if not isinstance(call.func, ast.Attribute):
            return self._builtin(call.func) in _PURE_BUILTINS
        root = _root(call.func)
        value, arguments = self._value(root), [*call.args, *call.keywords]
        if isinstance(root, ast.Name) and value is None and any(map(_has_name, arguments)):
            return False  # of an object that is not there yet, and may be of any class
        return call.func.attr in _PURE and not _is_own(value)

    def _trains(self, function: ast.expr) -> bool:
        """Return True for `backward`, and for a function or method of the script that calls it."""
        if isinstance(function, ast.Attribute):
            if function.attr == "backward":
                return True
            value = getattr(type(self._value(function.value)), function.attr, None)
        else:
            value = self._value(function)
        return isinstance(value, types.FunctionType) and "backward" in value.__code__.co_names

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
        if isinstance(node, (ast.Constant, ast.Compare, ast.UnaryOp, ast.JoinedStr)):
            return _NONE, _NONE
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            either = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            pairs = [self._sources(one) for one in either]
            return _NONE.union(*(a for a, _ in pairs)), _NONE.union(*(b for _, b in pairs))
        if isinstance(node, ast.Call) and self._makes_anew(node):
            return _NONE, _NONE
        parts = self._parts(node)
        if parts is None:
            return _UNKNOWN, _UNKNOWN
        return _NONE, _NONE.union(*(each for part in parts for each in self._sources(part)))

    def _parts(self, node: ast.expr) -> list[ast.expr] | None:
        """Return what a container in the source is made of; None for anything else."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return node.elts
        if isinstance(node, ast.Dict):
            return node.values
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return [node.elt]
        if isinstance(node, ast.DictComp):
            return [node.value]
        if isinstance(node, ast.BinOp):  # of lists
            return [node.left, node.right]
        if isinstance(node, ast.Call):
            builtin = self._builtin(node.func)
            made = self._value(node.func) if builtin is None else getattr(builtins, builtin)
            if any(made is kind for kind in _CONTAINERS):
                return [*node.args, *(keyword.value for keyword in node.keywords)]
        return None

    def _makes_anew(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute):
            return call.func.attr in _ANEW and self._is_pure(call)
        return self._builtin(call.func) in _ANEW_BUILTINS

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


def _stored_in(target: ast.expr) -> str | None:
    """Return the name that a change of this target changes; None for one not understood."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return each target with its part of the value, as in `a, b = 0, []`."""
    kinds = (ast.Tuple, ast.List)
    if isinstance(target, kinds) and isinstance(value, kinds):
        is_plain = not any(isinstance(e, ast.Starred) for e in (*target.elts, *value.elts))
        if is_plain and len(target.elts) == len(value.elts):
            return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _has_name(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) for each in ast.walk(node))


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that are read or bound anywhere in a tree."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, (ast.Global, ast.Nonlocal)):
            yield from each.names
