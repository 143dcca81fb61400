"""A resume makes many objects: nobody looks for cycles meanwhile."""

import gc

import pytest

from trainckpt.gc_pause import gc_paused


@pytest.fixture
def collections():
    """How many began, while the test lasts."""
    begun = []

    def note(phase, info):
        if phase == "start":
            begun.append(info["generation"])

    gc.callbacks.append(note)
    yield begun
    gc.callbacks.remove(note)


def make_many():
    return [[number] for number in range(10 * gc.get_threshold()[0])]


def test_no_collection_begins_inside_and_they_begin_again_behind_it(collections):
    """Else many objects would have had one begin."""
    with gc_paused():
        made = make_many()
        assert not collections
    made += make_many()
    assert collections


def test_after_an_error_collections_begin_again():
    """A resume that is refused is not the end of every process."""
    with pytest.raises(ZeroDivisionError), gc_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_a_script_that_has_turned_collections_off_finds_them_off():
    """As many trainings do, to collect when all ranks do."""
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
