"""Send errors between ranks as JSON, so that all ranks end by the same one."""

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

    from trainckpt.ranks.store import RankStore

    Result = TypeVar("Result")

_CLASSES = {
    cls.__name__: cls
    for cls in (
        ConfigurationError,
        NothingToResume,
        TierUnavailable,
        UnusableSnapshot,
        TrainckptError,
    )
}


def to_json(error: TrainckptError) -> dict[str, Any]:
    """Return the error as JSON values."""
    name = next((c.__name__ for c in type(error).__mro__ if c.__name__ in _CLASSES), "")
    values: dict[str, Any] = {"class": name, "message": error.message, "hint": error.hint}
    if isinstance(error, StateMismatch):
        values["differences"] = list(error.differences)
        values["what"] = error.what
    return values


def from_json(data: dict[str, Any]) -> TrainckptError:
    """Return the error from the result of `to_json`."""
    if "differences" in data:
        return StateMismatch(data["what"], data["differences"], hint=data["hint"])
    cls = _CLASSES.get(data["class"], TrainckptError)
    return cls(data["message"], hint=data["hint"])


def gather_or_raise(
    channel: RankStore, key: str, call: Callable[[], Result], timeout_s: float
) -> list[Result]:
    """Return every rank's result of `call`, or raise the error of the first failed rank on all."""
    result: dict[str, Any]
    own_error: TrainckptError | None = None
    try:
        result = {"value": call()}
    except TrainckptError as error:
        own_error, result = error, {"error": to_json(error)}
    everyone = channel.gather(key, result, timeout_s)
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise (
                own_error if own_error and rank == channel.world.rank else from_json(other["error"])
            )
    return [other["value"] for other in everyone]
