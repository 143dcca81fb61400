"""Sources of stop notices. Each records notices and hands over values; nothing here acts on one."""

from __future__ import annotations

from trainckpt.preemption.notice_file import NoticeFiles
from trainckpt.preemption.signal_source import SignalSource

__all__ = ["NoticeFiles", "SignalSource"]
