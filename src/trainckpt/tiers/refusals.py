"""What a store's refusal means, whichever library tells it.

Each library has errors of its own around the same HTTP. What counts is the status of the answer,
wherever it stands in the chain of causes, or that there was no answer. Only what may well go better
the next time is `TRANSIENT`: a wrong key, a wrong name and a full store stay what they are.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from trainckpt.tiers.redacted import redacted

if TYPE_CHECKING:
    from collections.abc import Iterator

ABSENT, TAKEN, DENIED, FULL, BEYOND, TRANSIENT, REFUSED = (
    "absent", "taken", "denied", "full", "beyond the end", "transient", "refused",
)  # fmt: skip

_BY_STATUS = {
    401: DENIED, 403: DENIED, 404: ABSENT, 408: TRANSIENT, 409: TRANSIENT, 412: TAKEN,
    413: FULL, 416: BEYOND, 425: TRANSIENT, 429: TRANSIENT, 500: TRANSIENT, 502: TRANSIENT,
    503: TRANSIENT, 504: TRANSIENT, 507: FULL,
}  # fmt: skip
NO_BUCKET = "NoSuchBucket"
_NO_BUCKET = frozenset({NO_BUCKET, "ContainerNotFound"})
_BY_CODE = {
    NO_BUCKET: REFUSED, "EntityTooLarge": FULL, "QuotaExceeded": FULL,
    "RequestTimeout": TRANSIENT, "SlowDown": TRANSIENT, "RequestTimeTooSkewed": DENIED,
    # Google's
    "rateLimitExceeded": TRANSIENT, "userRateLimitExceeded": TRANSIENT,
    # Azure's: it answers 409 and 412 to much that stays as it is
    "ContainerNotFound": REFUSED, "BlobAlreadyExists": TAKEN, "InvalidAuthenticationInfo": DENIED,
    "BlobImmutableDueToPolicy": REFUSED, "BlobArchived": REFUSED, "SnapshotsPresent": REFUSED,
    "LeaseIdMissing": REFUSED, "PathConflict": REFUSED, "DirectoryIsNotEmpty": REFUSED,
}  # fmt: skip
# Libraries' classes for an answer that did not come, or broke off; by name, to import none of them.
_NO_ANSWER = frozenset({
    "botocore.exceptions.HTTPClientError", "botocore.exceptions.ConnectionError",
    "botocore.exceptions.IncompleteReadError", "botocore.parsers.ResponseParserError",
    "aiohttp.client_exceptions.ClientError", "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout", "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError", "azure.core.exceptions.IncompleteReadError",
    "google.auth.exceptions.TransportError",
})  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Who asks could not be found out, or proved: there was no request to the store.
_NO_LOGIN = ("Credential", "ClientAuthentication", "RefreshError")


class Refused(Exception):
    """What a store answered to a request of our own.

    Attributes:
        status_code: Of HTTP.
        code: The store's own word for it; "" if it has none.
    """

    def __init__(self, status_code: int, code: str, message: str) -> None:
        super().__init__(f"{status_code} {code}: {message}" if code else f"{status_code} {message}")
        self.status_code, self.code = status_code, code


def meaning(error: BaseException) -> str:
    """One of the words above."""
    for each in _causes(error):  # the outermost word counts
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
    """Whether a disk, or a quota on it, had no space left: by the system's word."""
    return number_behind(error) in _FULL


def number_behind(error: BaseException) -> int:
    """The system's number (errno) of what lies behind it; 0 if it gave none."""
    found = (each.errno for each in _causes(error) if isinstance(each, OSError))
    return next((number for number in found if number), 0)


def no_answer_behind(error: BaseException) -> BaseException | None:
    """What among its causes says that no answer came: a word around it may hide that."""
    return next((each for each in _causes(error) if _is_unanswered(each)), None)


def is_missing_bucket(error: BaseException) -> bool:
    """Whether not the object is absent, but all that could hold it."""
    return any(_answer(each)[0] in _NO_BUCKET for each in _causes(error))


def in_words(error: BaseException) -> str:
    """What happened, in one line that shows no secrets."""
    text = str(error)
    if getattr(error, "error_code", None):  # Azure's: the whole answer follows, and when it came
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
    """The code and the HTTP status of the answer that an error was made of, where it was."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return str(response.get("Error", {}).get("Code", "")), status
    code = error.code if isinstance(error, Refused) else getattr(error, "error_code", None)  # azure
    code = str(getattr(code, "value", code) or "")
    for name in ("status_code", "status", "code"):  # azure, aiohttp, gcsfs
        found = getattr(error, name, None)
        if isinstance(found, int):
            return code, found
    return code, None


def _is_unanswered(error: BaseException) -> bool:
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if getattr(error, "retryable", False) is True:  # google.auth's word, when it renews a login
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
    return TRANSIENT if number in (errno.EBUSY, errno.EAGAIN) else REFUSED
