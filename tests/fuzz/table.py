"""The table of parsers: name -> module that holds it. Those with tensors import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.engine import Parser

MODULES = {
    "texts": ("duration", "names", "places", "environment", "options", "commands"),
    "snapshots": ("manifest", "layout", "shard", "cursor"),
    "records": ("attempt", "run", "catalog", "notice", "told", "ends"),
    "encrypted": ("encrypted", "sealed", "keys", "parity"),
    "tensors": ("values", "targets", "restore"),
}
NAMES = [name for names in MODULES.values() for name in names]


def parser(name: str) -> Parser:
    """The parser of this name."""
    module = next(module for module, names in MODULES.items() if name in names)
    found: Parser = import_module(f"tests.fuzz.{module}").PARSERS[name]
    return found
