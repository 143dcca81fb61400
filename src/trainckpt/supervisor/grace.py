"""What a signal to the supervisor grants, and whether its host will be there again.

Ranks with a Checkpointer say how long they have. Of a command that has none nobody says but the
options that it was launched with: TRAINCKPT_GRACE, or trainckpt.toml.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.preemption import kubernetes
from trainckpt.supervisor import recorded_options
from trainckpt.supervisor.orders import less_margin_s

if TYPE_CHECKING:
    from collections.abc import Mapping


def without_ranks_s(facts: Mapping[str, Any]) -> float | None:
    """Seconds that a signal leaves, less what we need ourselves; None: nobody says.

    Args:
        facts: Of the attempt, with the options that it was launched with.
    """
    try:
        granted_s = recorded_options.read(facts).grace or kubernetes.granted_s(os.environ)
    except ConfigurationError:
        return None
    return None if granted_s is None else less_margin_s(granted_s)


def host_returns(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this host, as its processes see it, will be there again, for all that is known.

    A signal does not say that a host is lost; the notices of those who would take it away do, and
    the ranks hear those. A pod is gone for good: its process ids and its files are made anew.
    """
    return not kubernetes.in_pod(os.environ if environment is None else environment)
