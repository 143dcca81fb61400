"""trainckpt, copying every save beside training."""

from __future__ import annotations

from benchmarks.compare.systems.trainckpt import Trainckpt

from trainckpt.save.copying import OVERLAP


class Overlap(Trainckpt):
    copies = OVERLAP
    warm_saves = 3  # the first makes the arena, two prove what they copy


SYSTEM = Overlap
