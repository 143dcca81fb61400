"""The chaos driver's command line.

python -m tests.ray_chaos --count 20 --seed-from 1     these seeds
python -m tests.ray_chaos --replay 17                  one seed, its folder kept, its logs shown
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.elastic import storm
from tests.ray_chaos import chaos

if TYPE_CHECKING:
    from pathlib import Path


def make(seed: int, place: Path) -> tuple[str, chaos.Storm]:
    case = chaos.draw(seed)
    return case.words, chaos.Storm(case, place)


def main() -> int:
    args = storm.arguments("tests.ray_chaos", str(__doc__)).parse_args()
    return storm.run_seeds(args, make, chaos.References)


if __name__ == "__main__":
    raise SystemExit(main())
