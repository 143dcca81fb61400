"""What tests of integrations share: a stop in the test's own process."""

from __future__ import annotations

import signal

import pytest

from trainckpt.preemption.signal_source import DEFAULT_SIGNALS
from trainckpt.stop import shutdown


@pytest.fixture
def stays_when_stopped(monkeypatch):
    """With `on_stop="exit"` this process would end, and hear no signal until then."""
    handlers = {signum: signal.getsignal(signum) for signum in DEFAULT_SIGNALS}
    monkeypatch.setattr(shutdown, "exit_soon", lambda *_: None)
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
