"""The chaos driver's command line.

python -m tests.ray_chaos --count 20 --seed-from 1     these seeds
python -m tests.ray_chaos --replay 17                  one seed, its folder kept, its logs shown
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from tests.elastic import trace
from tests.ray_chaos import chaos


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.ray_chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed-from", type=int, default=1)
    parser.add_argument("--replay", type=int, metavar="SEED")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trainckpt-ray-"))
    seeds = range(args.seed_from, args.seed_from + args.count)
    references, verdicts = chaos.References(folder), Counter[str]()
    for seed in seeds if args.replay is None else [args.replay]:
        case, place = chaos.draw(seed), folder / f"seed{seed}"
        print(f"seed {seed}: {case.words}", flush=True)
        storm = chaos.Storm(case, place)
        ended = storm.run(references)
        verdicts[ended.verdict] += 1
        print(f"  {ended.verdict}: {ended.why}\n  " + "\n  ".join(ended.done), flush=True)
        if ended.verdict == trace.FAILED or args.replay is not None:
            print(storm.said(3000), flush=True)
            print(f"kept: {place}", flush=True)
        else:
            shutil.rmtree(place)
    print(", ".join(f"{name}: {verdicts[name]}" for name in sorted(verdicts)))
    if args.replay is None and not verdicts[trace.FAILED]:
        shutil.rmtree(folder)
    return 1 if verdicts[trace.FAILED] else 0


if __name__ == "__main__":
    raise SystemExit(main())
