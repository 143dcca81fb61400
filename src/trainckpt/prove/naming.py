"""Names for parts of the state, as a person would say them, and which of several to blame first.

When a run differs, many parts differ at once: a wrong dropout mask makes wrong gradients, which
make wrong weights. Causes come before effects here, so the first name is where to look.
"""

from __future__ import annotations

import re

# Whom to blame first, where several parts differ at the same boundary.
(
    UNTRACKED,
    ATTRIBUTE,
    DDP,
    ORDER,
    WORKERS,
    RNG,
    LOADER,
    OBJECT,
    BUFFER,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
) = range(12)

_LOADER = r"(?P<loader>loader(?:\.\d+)?)\."
_NAME = r"(\w+(?:\.\d+)?)"
# (pattern of the part's path, how to say it, whom it counts to); the first that matches holds.
_SAID: tuple[tuple[re.Pattern[str], str, int], ...] = tuple(
    (re.compile(pattern), said, blame)
    for pattern, said, blame in (
        (r"(.+), which is not tracked", "{0}, which is not tracked", UNTRACKED),
        (r"plain attributes\.(.+)", "{0}, an attribute that is in no state_dict", ATTRIBUTE),
        (r"(?:own|script) generators\.(.+)", "generator {0}", RNG),
        (r"ddp\.(.+)\.bucket_order", "DDP bucket order of {0}", DDP),
        (r"ddp\.(.+)\.forward_sync", "DDP forward-sync flag of {0}", DDP),
        (_LOADER + r"now\.integers\.(.+)\.(seed|epoch)", "{0} {1}", ORDER),
        (_LOADER + r"now\.generators\.(.+)", "generator of the {0}", ORDER),
        (_LOADER + r"now\.samplers\.(.+?)\.(.+)", "{0}: {1}", ORDER),
        (_LOADER + r"workers\.(\d+)\.own", "generators of the data in worker {0}", WORKERS),
        (_LOADER + r"workers\.(\d+)\.(\w+)", "{1} RNG of worker {0}", WORKERS),
        (_LOADER + r"base_seed", "base seed of the workers", WORKERS),
        (r"rng[./]([\w:]+)", "{0} RNG", RNG),
        (_LOADER + r"data now\.(.+)", "generator {0}", RNG),
        (_LOADER + r"data before\.(.+)", "generator {0} before the epoch's iterator", LOADER),
        (_LOADER + r"rng_before\.(\w+)", "{0} RNG before the epoch's iterator", LOADER),
        (_LOADER + r"window\.order\.rng\.(\w+)", "{0} RNG before the epoch's iterator", LOADER),
        (_LOADER + r"before\.\w+\.(.+)", "data loader: {0} before the epoch's iterator", LOADER),
        (_LOADER + r"own\.(.+)", "data loader: {0}", LOADER),
        (_LOADER + r"facts\.(.+)", "data loader: {0}", LOADER),
        (_LOADER + r"(.+)", "data loader: {0}", LOADER),
        (r"buffer/(.+)", "buffer {0}", BUFFER),
        (r"gradients/(.+)", "gradient of {0}", GRADIENT),
        (r"parameter/(.+)", "parameter {0}", PARAMETER),
        (_NAME + r"\.groups\.(\d+)\.options\.(.+)", "{0}: {2} of group {1}", OPTIMIZER),
        (_NAME + r"/group(\d+)\.(.+)", "{0}: {2} of group {1}", OPTIMIZER),
        (_NAME + r"/(.+)/([^/]+)", "{0} {2} of {1}", OPTIMIZER),
        (_NAME + r"[./](.+)", "{0}: {1}", OBJECT),
        (r"(.*)", "{0}", OBJECT),
    )
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|-v\d+")
# In the Trainer's log: what its speed_metrics() measures.
_CLOCK = re.compile(
    r"trainer\.state\.log_history\.\d+\.\w+_(?:runtime|(?:samples|steps|tokens)_per_second)"
)
_PROPER = {"numpy": "NumPy", "python": "Python", "torch": "torch"}


def say(part: str) -> str:
    """`rng/torch` -> "torch RNG", `loader.workers.1.numpy` -> "NumPy RNG of worker 1"."""
    return _match(part)[1]


def blame(part: str) -> int:
    """Which kind of state a part is, causes before effects: `UNTRACKED` ... `PARAMETER`."""
    return _match(part)[0]


def blame_order(part: str) -> tuple[int, bool, str]:
    """Sort key: causes before effects, the plain name before "... before the epoch's iterator"."""
    return blame(part), "before" in part, part


def family(part: str) -> str:
    """Return the name that all items of a list share, and all versions of a file.

    `trainer.log.3.seconds` -> "trainer.log.*.seconds", `x.last-v2.ckpt` -> "x.last.ckpt".
    """
    return _NUMBER.sub(lambda match: "" if match[0].startswith("-") else "*", part)


def is_clock(part: str) -> bool:
    """Return True for a time or rate that is known to be one, and decides nothing."""
    return _CLOCK.fullmatch(part) is not None


def _match(part: str) -> tuple[int, str]:
    for pattern, said, blamed in _SAID:
        match = pattern.fullmatch(part)
        if match is not None:
            named = match.groupdict()
            words = match.groups()[len(named) :]
            text = said.format(*(_PROPER.get(word, word) for word in words))
            return blamed, text + _which(named.get("loader", "loader"))
    raise AssertionError(part)


def _which(loader: str) -> str:
    return "" if loader == "loader" else f" ({loader})"
