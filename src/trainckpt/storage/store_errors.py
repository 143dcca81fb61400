"""Meaning of a store's error, the same for every client library.

Each library wraps the same HTTP in error classes of its own. `meaning` goes by the status of the
answer, anywhere in the chain of causes, or by the lack of an answer. Only errors likely to pass are
`TRANSIENT`: a wrong key, a wrong name and a full store stay as they are.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from trainckpt.errors import TierUnavailable
from trainckpt.storage.redact import redacted

if TYPE_CHECKING:
    from collections.abc import Iterator

ABSENT, TAKEN, DENIED, FULL, BEYOND, TRANSIENT, REFUSED = (
    "absent",
    "taken",
    "denied",
    "full",
    "beyond the end",
    "transient",
    "refused",
)

_BY_STATUS = {
    401: DENIED,
    403: DENIED,
    404: ABSENT,
    408: TRANSIENT,
    409: TRANSIENT,
    412: TAKEN,
    413: FULL,
    416: BEYOND,
    425: TRANSIENT,
    429: TRANSIENT,
    500: TRANSIENT,
    502: TRANSIENT,
    503: TRANSIENT,
    504: TRANSIENT,
    507: FULL,
}
NO_BUCKET = "NoSuchBucket"
_NO_BUCKET = frozenset({NO_BUCKET, "ContainerNotFound"})
_BY_CODE = {
    NO_BUCKET: REFUSED,
    "EntityTooLarge": FULL,
    "QuotaExceeded": FULL,
    "RequestTimeout": TRANSIENT,
    "SlowDown": TRANSIENT,
    "RequestTimeTooSkewed": DENIED,
    # Google's
    "rateLimitExceeded": TRANSIENT,
    "userRateLimitExceeded": TRANSIENT,
    # Azure's: many of its 409 and 412 answers are permanent
    "ContainerNotFound": REFUSED,
    "BlobAlreadyExists": TAKEN,
    "InvalidAuthenticationInfo": DENIED,
    "BlobImmutableDueToPolicy": REFUSED,
    "BlobArchived": REFUSED,
    "SnapshotsPresent": REFUSED,
    "LeaseIdMissing": REFUSED,
    "PathConflict": REFUSED,
    "DirectoryIsNotEmpty": REFUSED,
}
# Libraries' classes for a missing or broken-off answer; by name, to import none of them.
_NO_ANSWER = frozenset(
    {
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.parsers.ResponseParserError",
        "aiohttp.client_exceptions.ClientError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
        "azure.core.exceptions.IncompleteReadError",
        "google.auth.exceptions.TransportError",
    }
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_STARVED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_NO_THREAD = "can't start new thread"  # the text of CPython's RuntimeError
# The client found no valid credentials, and sent no request to the store.
_NO_LOGIN = ("Credential", "ClientAuthentication", "RefreshError")


class StoreError(Exception):
    """An error answer to a request of this package's own clients.

    Attributes:
        status_code: HTTP status.
        code: The store's error code; "" without one.
    """

    def __init__(self, status_code: int, code: str, message: str) -> None:
        super().__init__(f"{status_code} {code}: {message}" if code else f"{status_code} {message}")
        self.status_code, self.code = status_code, code


def meaning(error: BaseException) -> str:
    """Return the meaning of an error: one of the constants from `ABSENT` to `REFUSED`."""
    for each in _causes(error):  # the outermost meaning counts
        if _is_unanswered(each):
            return TRANSIENT
        code, status = _answer(each)
        if code in _BY_CODE:
            return _BY_CODE[code]
        if status in _BY_STATUS:
            return _BY_STATUS[status]
        if status is not None and status >= 400:
            return REFUSED
    return _of_the_system(error)


def is_full(error: BaseException) -> bool:
    """Return True if a disk, or a quota on it, had no space left (errno)."""
    return number_behind(error) in _FULL


def is_starved(error: BaseException) -> bool:
    """Return True if this host had no memory, descriptor or thread left for the call."""
    return any(
        isinstance(each, MemoryError)
        or (isinstance(each, OSError) and each.errno in _STARVED)
        or (isinstance(each, RuntimeError) and _NO_THREAD in str(each))
        for each in _causes(error)
    )


def starved(what: str, error: BaseException) -> TierUnavailable:
    """Return the error for a call that `is_starved`: "cannot start python"."""
    return TierUnavailable(
        f"{what}: {error}",
        hint="let this user have more open files, memory or processes (ulimit -a), then start "
        "again",
    )


def number_behind(error: BaseException) -> int:
    """Return the system's error number (errno) among the causes; 0 without one."""
    found = (each.errno for each in _causes(error) if isinstance(each, OSError))
    return next((number for number in found if number), 0)


def no_answer_behind(error: BaseException) -> BaseException | None:
    """Return the cause showing a missing answer, if any: an error around it may hide it."""
    return next((each for each in _causes(error) if _is_unanswered(each)), None)


def is_missing_bucket(error: BaseException) -> bool:
    """Return True if the bucket or container itself is missing, not only the object."""
    return any(_answer(each)[0] in _NO_BUCKET for each in _causes(error))


def in_words(error: BaseException) -> str:
    """Return the error in one line of at most 300 characters after its class, without secrets."""
    text = str(error)
    if getattr(error, "error_code", None):  # Azure's text goes on with the whole answer and a time
        text = f"{text.partition(chr(10))[0]} ({_answer(error)[0]})"
    text = redacted(" ".join(text.split()))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _answer(error: BaseException) -> tuple[str, int | None]:
    """Return the error code and HTTP status behind an error; "" and None if missing."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return str(response.get("Error", {}).get("Code", "")), status
    code = (
        error.code if isinstance(error, StoreError) else getattr(error, "error_code", None)
    )  # azure
    code = str(getattr(code, "value", code) or "")
    for name in ("status_code", "status", "code"):  # azure, aiohttp, gcsfs
        found = getattr(error, name, None)
        if isinstance(found, int):
            return code, found
    return code, None


def _is_unanswered(error: BaseException) -> bool:
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if getattr(error, "retryable", False) is True:  # google.auth sets it when it renews a login
        return True
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    return not kinds.isdisjoint(_NO_ANSWER) or "FSTimeoutError" in type(error).__name__


def _of_the_system(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return ABSENT
    if isinstance(error, FileExistsError):
        return TAKEN
    if isinstance(error, PermissionError) or any(w in type(error).__name__ for w in _NO_LOGIN):
        return DENIED
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return FULL
    return TRANSIENT if number == errno.EBUSY or is_starved(error) else REFUSED
