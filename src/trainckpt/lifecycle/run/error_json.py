"""Errors between ranks: rank 0's refusal travels as JSON, so that all ranks end by the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from trainckpt.errors import (
    ConfigurationError,
    NothingToResume,
    StateMismatch,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.ranks.channel import Channel

    Result = TypeVar("Result")

_CLASSES = {cls.__name__: cls for cls in (ConfigurationError, NothingToResume, TierUnavailable,
                                          UnusableSnapshot, TrainckptError)}  # fmt: skip


def to_json(error: TrainckptError) -> dict[str, Any]:
    """The error as it travels."""
    name = next((c.__name__ for c in type(error).__mro__ if c.__name__ in _CLASSES), "")
    found: dict[str, Any] = {"class": name, "message": error.message, "hint": error.hint}
    if isinstance(error, StateMismatch):
        found["differences"] = list(error.differences)
        found["what"] = error.what
    return found


def from_json(data: dict[str, Any]) -> TrainckptError:
    """The inverse of `to_json`."""
    if "differences" in data:
        return StateMismatch(data["what"], data["differences"], hint=data["hint"])
    cls = _CLASSES.get(data["class"], TrainckptError)
    return cls(data["message"], hint=data["hint"])


def together(
    channel: Channel, key: str, call: Callable[[], Result], timeout_s: float
) -> list[Result]:
    """Every rank's result of `call`, or on every rank the error of the first that failed."""
    told: dict[str, Any]
    own: TrainckptError | None = None
    try:
        told = {"value": call()}
    except TrainckptError as error:
        own, told = error, {"error": to_json(error)}
    everyone = channel.gather(key, told, timeout_s)
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise own if own and rank == channel.world.rank else from_json(other["error"])
    return [other["value"] for other in everyone]
