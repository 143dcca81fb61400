"""What must be true of a run that went on in other layouts.

Of an attempt: what `check.py` says of one; but where the layout is another than the one that had
committed, it went on from the start of the window. Tensor-parallel peers wrote the same lines.

Of the run, with the lines of earlier attempts at or after a later one's beginning left out: every
micro-batch is there once; every sample of a completed epoch was seen once, but for padding in the
epoch's last micro-batch, fewer than the ranks that share the data times their batch.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tests.campaign.check import Place, attempt_as_told, began
from tests.campaign.one_rank import ITEMS
from tests.campaign.watch import Scene, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.campaign.cases import Settings
    from tests.campaign.drive import Ended
    from tests.campaign.reshard import Chain


class Round(NamedTuple):
    """One micro-batch of all ranks that share the data."""

    place: Place
    epoch: int
    samples: list[int]
    most_padding: int


def check(chain: Chain, attempts: list[Ended], folder: Path) -> list[str]:
    """Everything that is wrong, one sentence each."""
    wrong = []
    for leg, ended in enumerate(attempts):
        scene = Scene(folder, chain.legs[leg].ranks)
        first = _to_begin(chain, attempts[: leg + 1])
        found = attempt_as_told(chain.case(leg), ended, scene, first)
        wrong += [f"leg {leg + 1}, {chain.legs[leg].words}: {w}" for w in found]
        wrong += [f"leg {leg + 1}: {w}" for w in _peers(chain.legs[leg], ended, scene)]
    last = attempts[-1]
    if not last.finished:
        return [*wrong, "the run did not finish"]
    return [*wrong, *_data(merged(chain, attempts, folder), chain.settings)]


def _to_begin(chain: Chain, attempts: list[Ended]) -> Place:
    """Where the last of these attempts was to go on."""
    committed = attempts[-1].before[2]
    if not committed:
        return 0, 0
    newest, leg = committed[-1], len(attempts) - 1
    numbers = [(ended.attempt_line or {}).get("attempt") for ended in attempts]
    same = chain.legs[numbers.index(newest.attempt)] == chain.legs[leg]
    return newest.place if same else (newest.step, 0)


def data_ranks(leg: Settings) -> range:
    """One rank of each group whose ranks see the same data."""
    pairs = leg.parallel == "tp" and leg.ranks % 2 == 0
    return range(0, leg.ranks, 2 if pairs else 1)


def _lines(ended: Ended, scene: Scene, rank: int) -> list[bytes]:
    return scene.lines(rank)[ended.before[0][rank] : ended.lines[rank]]


def _peers(leg: Settings, ended: Ended, scene: Scene) -> Iterator[str]:
    firsts = data_ranks(leg)
    for rank in set(range(leg.ranks)) - set(firsts):
        first = rank - rank % firsts.step
        pairs = zip(_lines(ended, scene, first), _lines(ended, scene, rank), strict=False)
        if any(ours != theirs for ours, theirs in pairs):
            yield f"ranks {first} and {rank} train the same micro-batches, but their lines differ"


def merged(chain: Chain, attempts: list[Ended], folder: Path) -> list[Round]:
    """What was trained in the end, in order."""
    kept: list[Round] = []
    for leg, ended in zip(chain.legs, attempts, strict=False):
        if ended.attempt_line:
            kept = [one for one in kept if one.place < began(ended)]
        kept += _rounds(leg, ended, Scene(folder, leg.ranks))
    return kept


def _rounds(leg: Settings, ended: Ended, scene: Scene) -> list[Round]:
    """Of one attempt. A micro-batch that only some ranks have finished will be trained again."""
    ranks = data_ranks(leg)
    most = len(ranks) * leg.batch_size - 1
    found = []
    for lines in zip(*(_lines(ended, scene, rank) for rank in ranks), strict=False):
        records = [json.loads(line) for line in lines]
        samples = [sample for record in records for sample in record["samples"]]
        found.append(Round(place_of(lines[0]), records[0]["epoch"], samples, most))
    return found


def _data(rounds: list[Round], settings: Settings) -> Iterator[str]:
    due = [divmod(n, settings.accumulate) for n in range(settings.micro_batches)]
    if [one.place for one in rounds] != due:
        yield f"the micro-batches trained in the end are {[one.place for one in rounds]}"
    epochs = sorted({one.epoch for one in rounds})
    if epochs != list(range(len(epochs))):
        yield f"the epochs are {epochs}"
    for epoch in epochs:
        of_epoch = [one for one in rounds if one.epoch == epoch]
        ended = epoch != epochs[-1]
        yield from (f"epoch {epoch}: {w}" for w in epoch_wrong(of_epoch, ended=ended))


def epoch_wrong(rounds: list[Round], *, ended: bool) -> Iterator[str]:
    """Of its rounds in order; one that has not `ended` may lack samples."""
    before = Counter(sample for one in rounds[:-1] for sample in one.samples)
    twice = sorted(sample for sample, times in before.items() if times > 1)
    if twice:
        yield f"samples {twice} were seen twice"
    seen = before + Counter(rounds[-1].samples)
    missing = sorted(set(range(ITEMS)) - set(seen))
    padding = seen.total() - len(seen)
    if ended and missing:
        yield f"samples {missing} were not seen"
    if padding and missing:
        yield f"{padding} samples were seen twice, but {missing} not at all"
    if padding > rounds[-1].most_padding:
        yield f"{padding} samples of padding, {rounds[-1].most_padding} may be"
