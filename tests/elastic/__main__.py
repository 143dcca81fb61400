"""The chaos driver's command line.

python -m tests.elastic --count 20 --seed-from 1     these seeds
python -m tests.elastic --replay 17                  one seed, its folder kept, its logs shown
python -m tests.elastic --starter trainckpt ...      `trainckpt run` in place of torchrun
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.elastic import agents, chaos, storm

if TYPE_CHECKING:
    from pathlib import Path

STARTERS = {"torchrun": agents.TORCHRUN, "trainckpt": agents.TRAINCKPT_RUN}


def main() -> int:
    parser = storm.arguments("tests.elastic", str(__doc__))
    parser.add_argument("--starter", choices=STARTERS, default="torchrun")
    args = parser.parse_args()

    def make(seed: int, place: Path) -> tuple[str, chaos.Storm]:
        case = chaos.draw(seed)
        return case.words, chaos.Storm(case, place, STARTERS[args.starter])

    return storm.run_seeds(args, make, chaos.References)


if __name__ == "__main__":
    raise SystemExit(main())
