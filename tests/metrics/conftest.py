"""The log of runs in this process."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def caplog(caplog, monkeypatch):
    """With the package's log, which otherwise ends before the root."""
    monkeypatch.setattr(logging.getLogger("trainckpt"), "propagate", True)
    return caplog
