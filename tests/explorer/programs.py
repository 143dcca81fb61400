"""Programs of ranks, and rounds: what real trainings look like to the agreement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tests.explorer.model import Op, Program, Request, Round

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Collectives = Literal["all", "last", "none", "ahead"]

STOP = Request("stop")
WINDOW_STOP = Request("stop", "window")
SAVE = Request("save")


def training(
    micro_batches: int = 3,
    collectives: Collectives = "all",
    *,
    epochs: int = 1,
    window: int = 1,
    evaluation: Literal["none", "behind", "unannounced", "inside"] = "none",
    close: Literal["commit", "leave"] = "commit",
) -> Program:
    """A rank that trains to its end.

    Args:
        collectives: In each micro-batch, in the last of each window, in none; "ahead": FSDP's
            all-gather of the next micro-batch is issued in this one, and a reduction follows.
        window: Micro-batches per window.
        evaluation: With a collective in it. Behind each epoch's end, its entry being a boundary
            or not; or inside the epoch, where its boundary is counted and nothing is done at it.
        close: `close()` with its commit, which no rank passes alone, or without.
    """
    ops: list[Op] = []
    for epoch in range(epochs):
        for m in range(micro_batches):
            name = f"{epoch}.{m}"
            ops.append(Op("boundary", name, window_end=m % window == 0))
            ops += _micro_batch(collectives, epoch, m, micro_batches, window)
            if evaluation == "inside" and m == 0:
                ops.append(Op("boundary", f"evaluation {epoch}", resumable=False))
                ops.append(Op("collective", f"evaluation {epoch}"))
        at_end = micro_batches % window == 0
        ops.append(Op("boundary", f"end of epoch {epoch}", window_end=at_end, epoch_end=True))
        if evaluation == "behind":
            ops.append(Op("boundary", f"evaluation {epoch}"))
        if evaluation in ("behind", "unannounced"):
            ops.append(Op("collective", f"evaluation {epoch}"))
    ops.append(Op("boundary", "close"))
    ops += [Op("commit", "final snapshot")] if close == "commit" else []
    ops.append(Op("leave"))
    return tuple(ops)


def raising(program: Program, boundaries: int) -> Program:
    """The same rank, but an exception ends it in the micro-batch behind so many boundaries."""
    places = [index for index, op in enumerate(program) if op.kind == "boundary"]
    return (*program[: places[boundaries - 1] + 1], Op("raise"))


def round_of(
    requests: Request | Sequence[Request | None], size: int, unable: Sequence[int] = ()
) -> Round:
    """A round that any rank may open with this request, or each with its own.

    Args:
        unable: Ranks that cannot take a save now.
    """
    each = (requests,) * size if isinstance(requests, Request) else tuple(requests)
    return Round(each, tuple(rank not in unable for rank in range(size)))


def _micro_batch(
    collectives: Collectives, epoch: int, m: int, of: int, window: int
) -> Iterator[Op]:
    if collectives == "ahead":
        gather = f"all-gather {epoch}."
        yield Op("wait", f"{gather}{m}") if m else Op("collective", f"{gather}{m}")
        if m + 1 < of:
            yield Op("issue", f"{gather}{m + 1}")
        yield Op("collective", f"reduce {epoch}.{m}")
    elif collectives == "all" or (collectives == "last" and (m + 1) % window == 0):
        yield Op("collective", f"reduce {epoch}.{m}")
    else:
        yield Op("work")
