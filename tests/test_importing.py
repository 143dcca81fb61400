"""Imports without the garbage collector: it is as before afterwards."""

from __future__ import annotations

import contextlib
import gc

import pytest

from trainckpt.gc_pause import gc_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    # Also where an import fails.
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), gc_paused():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
