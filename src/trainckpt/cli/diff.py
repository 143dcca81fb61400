"""diff: compare the tensors and values of two checkpoints."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainckpt.cli import output
from trainckpt.cli.output import text
from trainckpt.run_directory import run_tiers

if TYPE_CHECKING:
    from trainckpt.inspect.difference import TensorDifference, ValueDifference

DIFFERENT = 1
MOST_VALUES, MOST_TEXT = 40, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("a", metavar="RUN[@A]", help="default: the latest snapshot")
    parser.add_argument("b", metavar="RUN[@B]", help="of the same run or another one")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="T",
        help="largest absolute difference of equal elements; by default every bit counts",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Compare two snapshots; 1 if they differ."""
    from trainckpt.inspect import difference
    from trainckpt.inspect.contents import Contents

    a, b = (Contents(run_tiers.open_source(target)) for target in (arguments.a, arguments.b))
    for note in [*a.source.passed_over, *b.source.passed_over]:
        print(f"note: {note}", file=sys.stderr)
    names = {*a.names, *b.names}
    with output.progress() as progress:
        task = progress.add_task("comparing", total=len(names))
        found = difference.tensor_differences(
            a, b, tolerance=arguments.tolerance, progress=lambda _: progress.advance(task)
        )
        tensors = list(found)
    values = difference.value_differences(a, b)
    skipped = sorted(difference.left_out(a, b) & {*a.values(), *b.values()})
    if arguments.json:
        output.document(
            {
                "a": str(a.source),
                "b": str(b.source),
                "equal": not tensors and not values,
                "compared": len(names),
                "tensors": [{**asdict(one), "max_abs": _number(one.max_abs)} for one in tensors],
                "values": [asdict(one) for one in values],
                "not_compared": skipped,
                "notes": [*a.source.passed_over, *b.source.passed_over],
            }
        )
        return DIFFERENT if tensors or values else 0
    print(f"A: {a.source}\nB: {b.source}")
    _print_tables(tensors, values)
    if skipped:
        print(f"not compared, may differ: {', '.join(skipped)}")
    if tensors or values:
        differing = len({difference.name for difference in tensors})
        print(f"{differing} of {len(names)} tensors differ, and {len(values)} values")
        return DIFFERENT
    print(f"no difference: {len(names)} tensors, and all values")
    return 0


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)  # JSON has no nan


def _print_tables(tensors: list[TensorDifference], values: list[ValueDifference]) -> None:
    if tensors:
        columns = ("tensor", "rank", "difference", "elements", "of", "largest")
        output.table(columns, [_row(one) for one in tensors])
    if values:
        rows = [(v.path, text(v.rank), _short(v.a), _short(v.b)) for v in values[:MOST_VALUES]]
        output.table(("value", "rank", "A", "B"), rows)
    if len(values) > MOST_VALUES:
        print(f"and {len(values) - MOST_VALUES} more values (--json has all)")


def _row(one: TensorDifference) -> tuple[str, ...]:
    kind = f"{one.kind}: {one.detail}" if one.detail else one.kind
    largest = "" if one.max_abs is None else f"{one.max_abs:.3g}"
    return (one.name, text(one.rank), kind, text(one.differing), text(one.elements), largest)


def _short(value: str) -> str:
    return value if len(value) <= MOST_TEXT else f"{value[: MOST_TEXT - 3]}..."


def _tolerance(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 on")
    return value
