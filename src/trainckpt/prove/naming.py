"""Names for parts of the state, as a person would say them, and which of several to blame first.

When a run differs, many parts differ at once: a wrong dropout mask makes wrong gradients, which
make wrong weights. Causes come before effects here, so the first name is where to look.
"""

from __future__ import annotations

import re

# (pattern of the part's path, how to say it); earlier ones are blamed first.
_SAID: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), said)
    for pattern, said in (
        (r"(.+), which is not tracked", "{0}, which is not tracked"),
        (r"ddp\.(.+?)\.bucket_order", "DDP bucket order of {0}"),
        (r"ddp\.(.+?)\.forward_sync", "DDP forward-sync flag of {0}"),
        (r"loader(?:\.\d+)?[./]samplers?\b.*?(seed|epoch)", "sampler {0}"),
        (r"loader(?:\.\d+)?[./]workers?[./](\d+)[./](\w+).*", "{1} RNG of worker {0}"),
        (r"loader(?:\.\d+)?[./](.+)", "data loader: {0}"),
        (r"rng[./](\w+(?::\d+)?).*", "{0} RNG"),
        (r"(\w+(?:\.\d+)?)\.groups\.(\d+)\.options\.(.+)", "{0}: {2} of parameter group {1}"),
        (r"(\w+(?:\.\d+)?)\.(?:groups|state)\.(.+)", "{0}: {1}"),
        (r"(\w+(?:\.\d+)?)/(.+/.+)/(\w+)", "{0} {2} of {1}"),
        (r"gradients[./](.+?)(?:\.device)?", "gradient of {0}"),
        (r"(.*)", "{0}"),
    )
)
_PROPER = {"numpy": "NumPy", "python": "Python", "torch": "torch"}


def say(part: str) -> str:
    """`rng/torch` -> "torch RNG", `loader.workers.1.numpy.key` -> "NumPy RNG of worker 1"."""
    return _match(part)[1]


def blame_order(part: str) -> tuple[int, str]:
    """Sort key: causes before effects."""
    return _match(part)[0], part


def _match(part: str) -> tuple[int, str]:
    for rank, (pattern, said) in enumerate(_SAID):
        match = pattern.fullmatch(part)
        if match is not None:
            words = [_PROPER.get(word or "", word or "") for word in match.groups()]
            return rank, said.format(*words)
    return len(_SAID), part
