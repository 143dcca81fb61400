"""Who may stop us. Each source takes note and hands over values; nothing here acts on one.

Floor 1. Uses: nothing of ours. Used by: lifecycle.
"""

from __future__ import annotations

from trainckpt.preemption.halt_file import NoticeFiles
from trainckpt.preemption.notice import Notice, NoticeSource
from trainckpt.preemption.signals import SignalSource

__all__ = ["Notice", "NoticeFiles", "NoticeSource", "SignalSource"]
