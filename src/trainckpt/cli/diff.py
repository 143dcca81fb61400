"""diff: compare the tensors and values of two checkpoints."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainckpt.cli import output
from trainckpt.run_directory import run_tiers

if TYPE_CHECKING:
    from trainckpt.inspect.contents import Contents
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
        tensors = list(
            difference.tensor_differences(
                a, b, tolerance=arguments.tolerance, progress=lambda _: progress.advance(task)
            )
        )
    values = difference.value_differences(a, b)
    skipped = sorted(difference.left_out(a, b) & {*a.values(), *b.values()})
    if arguments.json:
        output.document(
            _to_json(a, b, tensors=tensors, values=values, skipped=skipped, compared=len(names))
        )
    else:
        _tell(a, b, tensors=tensors, values=values, skipped=skipped, compared=len(names))
    return DIFFERENT if tensors or values else 0


def _to_json(
    a: Contents,
    b: Contents,
    *,
    tensors: list[TensorDifference],
    values: list[ValueDifference],
    skipped: list[str],
    compared: int,
) -> dict[str, Any]:
    return {
        "a": str(a.source),
        "b": str(b.source),
        "equal": not tensors and not values,
        "compared": compared,
        "tensors": [
            {**asdict(difference), "max_abs": _number(difference.max_abs)} for difference in tensors
        ],
        "values": [asdict(difference) for difference in values],
        "not_compared": skipped,
        "notes": [*a.source.passed_over, *b.source.passed_over],
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)  # JSON has no nan


def _tell(
    a: Contents,
    b: Contents,
    *,
    tensors: list[TensorDifference],
    values: list[ValueDifference],
    skipped: list[str],
    compared: int,
) -> None:
    print(f"A: {a.source}\nB: {b.source}")
    if tensors:
        output.table(
            ("tensor", "rank", "difference", "elements", "of", "largest"),
            [_row(difference) for difference in tensors],
        )
    if values:
        output.table(
            ("value", "rank", "A", "B"),
            [(v.path, _text(v.rank), _short(v.a), _short(v.b)) for v in values[:MOST_VALUES]],
        )
    if len(values) > MOST_VALUES:
        print(f"and {len(values) - MOST_VALUES} more values (--json has all)")
    if skipped:
        print(f"not compared, may differ: {', '.join(skipped)}")
    if tensors or values:
        differing = len({difference.name for difference in tensors})
        print(f"{differing} of {compared} tensors differ, and {len(values)} values")
    else:
        print(f"no difference: {compared} tensors, and all values")


def _row(one: TensorDifference) -> tuple[str, ...]:
    kind = f"{one.kind}: {one.detail}" if one.detail else one.kind
    largest = "" if one.max_abs is None else f"{one.max_abs:.3g}"
    return (one.name, _text(one.rank), kind, _text(one.differing), _text(one.elements), largest)


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value
