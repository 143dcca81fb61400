"""Which branches an input takes: trainckpt's modules are compiled with a mark in every block.

A mark is one store into a byte array, so a run under it is about as fast as one without. Nothing
is traced, so it works on every Python, and nothing has to be downloaded.
"""

from __future__ import annotations

import ast
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader

PACKAGE = "trainckpt"
MARKS = 1 << 14
NAME = "__fuzz_marks__"
_BLOCKS = ("body", "orelse", "finalbody")


class _Marker(ast.NodeTransformer):
    """Puts a mark at the beginning of every block, and before what may not be evaluated."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage

    def generic_visit(self, node):
        super().generic_visit(node)
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.Lambda, ast.IfExp, ast.Expression)):
            for block in _BLOCKS:
                found = getattr(node, block, None)
                if isinstance(found, list) and found:
                    at = int(_is_docstring(found[0]))
                    found.insert(at, self._statement(found[0]))
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        node.values = [node.values[0], *map(self._marked, node.values[1:])]
        return node

    def visit_IfExp(self, node):
        self.generic_visit(node)
        node.body, node.orelse = self._marked(node.body), self._marked(node.orelse)
        return node

    def _target(self):
        return ast.Name(NAME, ast.Load()), ast.Constant(self._coverage.new_mark())

    def _statement(self, where):
        name, mark = self._target()
        made = ast.Assign([ast.Subscript(name, mark, ast.Store())], ast.Constant(1))
        return ast.fix_missing_locations(ast.copy_location(made, where))

    def _marked(self, value):
        name, mark = self._target()
        call = ast.Call(ast.Attribute(name, "__setitem__", ast.Load()), [mark, ast.Constant(1)], [])
        made = ast.BoolOp(ast.Or(), [call, value])  # the call returns None
        return ast.fix_missing_locations(ast.copy_location(made, value))


class _Loader(SourceFileLoader):
    coverage: Coverage

    def get_code(self, fullname):
        tree = ast.parse(self.get_data(self.path), self.path)
        return compile(_Marker(self.coverage).visit(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__[NAME] = self.coverage.marks
        super().exec_module(module)


class Coverage(MetaPathFinder):
    """Branches taken since `begin`, and those that any input took before."""

    def __init__(self) -> None:
        self.marks = bytearray(MARKS)
        self._made = 0
        self._nothing = bytes(MARKS)
        self._seen = 0
        self._ways: set[int] = set()

    def install(self) -> None:
        """From now on, modules of the package are compiled with marks."""
        loaded = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
        assert not loaded, "the package was imported before"
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.coverage = self
        return spec

    def new_mark(self) -> int:
        self._made += 1
        assert self._made < MARKS
        return self._made

    def begin(self) -> None:
        """Forget what was taken; the array stays the one the modules hold."""
        self.marks[:] = self._nothing

    def forget(self) -> None:
        """Begin anew, for another parser."""
        self._seen = 0
        self._ways.clear()

    def is_new(self) -> bool:
        """Whether a branch was taken that none took before."""
        way = hash(bytes(self.marks[: self._made + 1]))
        if way in self._ways:
            return False
        self._ways.add(way)
        taken = int.from_bytes(self.marks, "little")
        new = taken & ~self._seen
        self._seen |= taken
        return bool(new)

    @property
    def taken(self) -> int:
        """Branches taken by any input."""
        return self._seen.bit_count()


def _is_docstring(statement) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
