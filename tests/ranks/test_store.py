"""Values between ranks: one rank alone, and several over each kind of store."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from trainckpt.errors import ConfigurationError, NoAgreement
from trainckpt.ranks import RankStore, World, connect, local_store
from trainckpt.ranks.store import own_connection


def make_store(kind, folder):
    if kind == "tcp":
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return HashStore() if kind == "hash" else FileStore(str(folder / "store"), 1)


def ranks_over(store):
    """Two ranks in one process, each on a connection of its own."""
    return [RankStore(World(r, 2, r, "here"), store, "test/1/").connection() for r in range(2)]


@pytest.fixture(params=["tcp", "hash", "file"])
def store(request, tmp_path):
    return make_store(request.param, tmp_path)


@pytest.fixture
def two(store):
    return ranks_over(store)


@pytest.fixture(params=["alone", "tcp", "hash", "file"])
def channel(request, tmp_path):
    if request.param == "alone":
        return local_store(World(0, 1, 0, "here"))
    return ranks_over(make_store(request.param, tmp_path))[0]


def test_a_value_is_read_as_it_was_put(channel):
    """Any JSON, also some hundred kilobytes of it."""
    for value in ({"a": [1, 2.5, "x", None]}, 0, "", "x" * 300_000):
        channel.put("key", value)
        assert channel.peek("key") == value
        assert channel.get("key", 1) == value


def test_peek_does_not_wait(channel):
    """A key that is not there is None, at once, alone or among others."""
    channel.put_all({"a": 1, "b": 2})
    assert channel.peek("c") is None
    assert channel.peek_all(["a", "c", "b"]) == [1, None, 2]


def test_the_first_proposal_wins(channel):
    """Whoever proposes later reads the first."""
    assert channel.propose("decision", {"bound": 4}) == {"bound": 4}
    assert channel.propose("decision", {"bound": 5}) == {"bound": 4}


def test_a_counter_counts(channel):
    """By one, or not at all to read it."""
    assert [channel.count("n"), channel.count("n"), channel.count("n", 0)] == [1, 2, 2]


def test_what_is_forgotten_is_not_there_whether_value_or_counter(channel):
    """What never was can be forgotten too."""
    channel.put_all({"a": 1, "b": 2})
    channel.count("n")
    channel.forget(["a", "n", "never"])
    assert channel.peek_all(["a", "b"]) == [None, 2]
    assert channel.count("n") == 1


def test_a_scope_is_a_place_of_its_own(channel):
    """The same key in two attempts is two keys."""
    channel.scoped("1").put("key", "old")
    assert channel.scoped("2").peek("key") is None
    assert channel.peek("1/key") == "old"


def test_a_get_in_vain_says_what_was_waited_for_and_how_long(channel):
    """The error names key and time."""
    with pytest.raises(NoAgreement, match=r"0\.05 s for 'never'"):
        channel.get("never", 0.05)


def test_one_rank_gathers_and_passes_barriers_by_itself():
    """No store, no process group."""
    channel = local_store(World(0, 1, 0, "here"))
    assert channel.gather("x", 5, 1) == [5]
    channel.barrier("y", 1)


def test_two_ranks_gather_what_both_brought(two):
    """In the order of ranks, whoever comes first."""
    results = []
    thread = threading.Thread(target=lambda: results.append(two[1].gather("x", "b", 10)))
    thread.start()
    results.append(two[0].gather("x", "a", 10))
    thread.join()
    assert results == [["a", "b"]] * 2


def test_a_second_exchange_under_the_same_key_is_refused(two):
    """Its ranks would not wait for each other, and would read the values of the first."""
    threads = [threading.Thread(target=rank.gather, args=("key", 1, 10)) for rank in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    with pytest.raises(AssertionError, match="rank 1 exchanged 'key' a second time"):
        two[1].gather("key", 2, 10)


def test_a_gather_that_some_rank_does_not_join_names_it(two):
    """At 3 a.m. the number of the silent rank is what counts."""
    with pytest.raises(NoAgreement, match="'x' from rank 0"):
        two[1].gather("x", "b", 0.05)


def test_a_wait_on_a_connection_of_its_own_stalls_no_other_call(two):
    """The first client goes on while the second waits."""
    waiting = two[0].connection()
    thread = threading.Thread(target=waiting.get, args=("late", 10))
    thread.start()
    for number in range(20):
        two[0].put("quick", number)
    assert thread.is_alive()
    two[0].put("late", True)
    thread.join(5)
    assert not thread.is_alive()


def test_without_clone_a_second_connection_reaches_the_same_store(store):
    """As on torch before 2.8: prefixes are left out, on all ranks alike."""
    first = own_connection(PrefixStore("a", PrefixStore("b", store)), clone=False)
    second = own_connection(PrefixStore("a", store), clone=False)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_several_ranks_without_a_process_group_are_told_what_to_call():
    """Instead of a name from the inside of torch."""
    with pytest.raises(ConfigurationError, match="init_process_group"):
        connect(World(0, 2, 0, "here"), "test/1")


def test_one_rank_needs_no_process_group():
    """A plain `python train.py`."""
    channel = connect(World(0, 1, 0, "here"), "test/1")
    channel.put("key", 1)
    assert channel.peek("key") == 1
