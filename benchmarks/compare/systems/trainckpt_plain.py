"""trainckpt, copying every save while training waits."""

from __future__ import annotations

from benchmarks.compare.systems.trainckpt import Trainckpt

from trainckpt.save.copying import PLAIN


class Plain(Trainckpt):
    copies = PLAIN
    warm_saves = 2


SYSTEM = Plain
