"""What a resume in another layout says of the state that is not the one it would have been."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch.distributed import HashStore

from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.cursor import Cursor
from trainckpt.format.exactness import How, Restored, decide
from trainckpt.format.layout import replicated
from trainckpt.format.manifest import Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.ranks.store import RankStore
from trainckpt.ranks.world import World
from trainckpt.resume.exactness_report import of_all_ranks, other_state
from trainckpt.resume.resume import ResumePoint
from trainckpt.state.captured import Saved


def reasons(then, now, *, micro=0, objects=()):
    """Of a model whose buffer and one parameter differ from rank to rank."""
    tensors = {
        "model/w": TensorEntry("F32", (2,), replicated(then)),
        "model/b": TensorEntry("F32", (2,)),
        "model/mean": TensorEntry("F32", (2,)),
        "rng/torch": TensorEntry("U8", (2,)),
    }
    window, cursor = Cursor(step=3, micro_batches=6), Cursor(3, 3, micro, 0, 6 + micro)
    name = SnapshotName(1, 1, 3, micro)
    manifest = Manifest("r", name, None, cursor, then, (), tensors, 0.0, window=window)
    values = {"model": {"tied": {}, "extra": {}}, "rng": {}}
    saved = Saved({}, values, exact=False, worlds=(then, now))
    found = other_state(ResumePoint("r", AttemptRecord(2), manifest, saved), objects)
    assert {part.how for part in found} == {How.NOT_KEPT}
    return [part.reason for part in found]


def test_tensors_that_each_rank_had_for_itself_are_named_where_ranks_come_or_go():
    assert "each rank had its own, 2 of 4 go on: model/b, model/mean" in reasons(4, 2)
    assert "each rank had its own, new ranks take another's: model/b, model/mean" in reasons(2, 4)
    assert not any("its own" in reason for reason in reasons(2, 2))


def test_the_script_s_objects_that_cannot_go_back_to_the_window_s_start_are_named():
    found = reasons(2, 1, micro=1, objects=["position", "metrics"])
    assert "inside that window still, not at its start: metrics, position" in found
    assert not any("inside" in reason for reason in reasons(2, 1, objects=["position"]))


def test_what_another_rank_alone_could_not_put_back_is_said_with_its_rank():
    a_list, by_itself = (
        not_kept("a list"),
        Restored("loader", How.OWN_STATE, "a loader's own state"),
    )
    generator = not_kept("a generator")
    store, own = HashStore(), [[a_list], [a_list, generator], [generator, by_itself]]

    def said(rank):
        return of_all_ranks(RankStore(World(rank, 3, rank, "here"), store), own[rank])

    with ThreadPoolExecutor(3) as ranks:
        everyone = list(ranks.map(said, range(3)))
    of_others = [replace(generator, rank=1), replace(by_itself, rank=2)]
    assert everyone == [[a_list, *of_others]] * 3
    exactness = decide(everyone[0])
    assert exactness.line == "same data, not bitwise: rng, rng on rank 1"
    assert exactness.reasons == ["a list", "rank 1: a generator"]


def not_kept(reason):
    return Restored("rng", How.NOT_KEPT, reason)
