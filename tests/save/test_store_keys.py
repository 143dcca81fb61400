"""What ranks tell each other about saves is forgotten once all have read it, and not before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from tests.end_to_end import kept_by_others
from tests.limits import HANG_S
from tests.ranks.processes import preload, run_ranks
from trainckpt.ranks import RankStore, World
from trainckpt.replicate.replicator import STEP_S
from trainckpt.save import committer

preload("tests.end_to_end.kept_by_others")
RANKS = 3


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Rank:
    """What a saver and its writer tell and read."""

    def __init__(self, store, rank):
        world = World(rank, RANKS, rank, "here")
        self.channel = RankStore(world, store, "test/").connection()
        self.rank, self.keys = rank, committer.SaveKeys(self.channel)

    def save(self, sequence, skipped=()):
        """Up to the verdict; its keys stay if it is skipped."""
        fold = self.channel.fold(committer.groups_key(sequence), self.rank, sum, HANG_S)
        assert fold == sum(range(RANKS))
        if sequence in skipped:
            return
        if self.rank:
            self.channel.put(committer.report_key(sequence, self.rank), sequence)
        else:
            for other in range(1, RANKS):
                assert self.channel.get(committer.report_key(sequence, other), HANG_S) == sequence
            self.channel.put(committer.verdict_key(sequence), sequence)
        assert self.channel.get(committer.verdict_key(sequence), HANG_S) == sequence
        self.keys.delete_read(sequence)


def test_the_keys_of_many_saves_do_not_add_up(store):
    ranks = [Rank(store, rank) for rank in range(RANKS)]
    left = []
    with ThreadPoolExecutor(RANKS) as pool:
        for sequence in range(1, 31):
            skipped = range(10, 20)
            list(pool.map(lambda rank, n=sequence, s=skipped: rank.save(n, s), ranks))
            left.append(store.num_keys())
    assert left[0] == left[8] == left[-1]
    assert left[18] > left[8]  # those that were skipped go with the next that is not
    own = {f"{committer.groups_key(30)}/{rank}" for rank in range(RANKS)}
    assert not any(store.check([f"test/{key}"]) for key in own)
    assert store.check([f"test/{committer.verdict_key(30)}"])  # some rank may be about to read it
    assert not store.check([f"test/{committer.verdict_key(29)}"])


@pytest.fixture(scope="module")
def saved_often(tmp_path_factory):
    """What two ranks saw."""
    folder = str(tmp_path_factory.mktemp("often"))
    return run_ranks(kept_by_others.save_often, 2, folder, (10, 50))


def test_a_run_that_saves_keeps_and_copies_all_the_time_leaves_no_keys_behind(saved_often):
    for (at_10, at_50), _ in saved_often:
        assert at_50 - at_10 <= kept_by_others.UNDER_WAY


def test_a_rank_that_lets_go_of_what_is_kept_keeps_no_other_waiting_for_its_part(saved_often):
    for _, (why, took_s) in saved_often:
        assert "rank 0: the final save needs the network" in why
        assert took_s < STEP_S / 2


def test_tables_of_tensors_whose_shapes_change_are_forgotten(tmp_path):
    """Two keys for each table: of the last saves, of either rank."""
    for (at_10, at_30), is_as_saved in run_ranks(
        kept_by_others.save_what_grows, 2, str(tmp_path), (10, 30)
    ):
        assert at_30 - at_10 <= kept_by_others.UNDER_WAY
        assert is_as_saved
