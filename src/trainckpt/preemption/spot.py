"""Spot machines: the cloud announces the end of this machine, at an address inside it.

    AWS    two minutes ahead: a token (IMDSv2), then spot/instance-action, 404 until there is one
    GCE    30 s ahead: instance/preempted, a request that waits until the value changes
    Azure  30 s ahead or more: Scheduled Events, a list that names this machine

The vendor files of the machine's firmware identify the cloud, without the network. One rank of a
host queries it, in a thread. The time left is computed by the server's own clock if its answer
holds one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from trainckpt.format.duration import MOST_S
from trainckpt.notice import AWS, AZURE, GCE, Notice
from trainckpt.preemption.polling import PollFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

METADATA = "http://169.254.169.254"  # link-local: of the machine itself in all three clouds
VENDOR_FILES = Path("/sys/class/dmi/id")
TIMEOUT_S, FIRST_TIMEOUT_S = 5.0, 130.0  # Azure: the first answer may take 2 minutes
WAIT_S = 60  # GCE: how long one request waits for a change
MAX_BYTES = 256 * 1024
TOKEN_S = 21600
GCE_LEFT_S = 30.0
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_AZURE_STOPS = ("Preempt", "Terminate", "Redeploy", "Reboot")


@dataclass(frozen=True)
class MetadataReply:
    """Reply of a metadata server."""

    status: int
    text: str
    etag: str
    now_s: float  # its clock, in seconds since the epoch; ours if it states none


class Metadata:
    """One metadata server. Never through a proxy, and redirected nowhere."""

    def __init__(self, url: str = METADATA) -> None:
        self._host = urlsplit(url).netloc or url

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        timeout_s: float = TIMEOUT_S,
    ) -> MetadataReply:
        """Make one request.

        Raises:
            OSError: no answer in time.
            PollFailed: an answer that is not HTTP.
        """
        connection = None
        try:
            connection = http.client.HTTPConnection(self._host, timeout=timeout_s)
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(MAX_BYTES).decode("utf-8", "replace").strip()
            date = _date(response.headers.get("Date", ""))
            etag = response.headers.get("ETag", "")
            return MetadataReply(response.status, text, etag, time.time() if date is None else date)
        except (http.client.HTTPException, ValueError) as error:
            what = f"{type(error).__name__} {error}"[:200]
            raise PollFailed(f"{self._host} does not speak HTTP: {what}") from error
        finally:
            if connection is not None:
                connection.close()


class Aws:
    """EC2's notice of a spot interruption."""

    pause_s = 5.0  # as AWS advises

    def __init__(self, metadata: Metadata) -> None:
        self._metadata, self._token = metadata, ""

    def __call__(self) -> list[Notice]:
        """Ask the metadata service once. In the background."""
        if not self._token:
            self._token = self._new_token()
        answer = self._metadata.ask(
            "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
        )
        if answer.status == 404:
            return []
        if answer.status == 401:  # the token is too old
            self._token = ""
        _must_be_ok(AWS, answer)
        found = _object(AWS, answer)
        action, left_s = found.get("action"), _left_s(found.get("time"), answer.now_s)
        if not isinstance(action, str) or left_s is None:
            raise PollFailed(f"{AWS}: no spot notice: {answer.text[:200]!r}")
        return [Notice(f"{AWS} spot {action[:20]}", seconds_left=left_s)]

    def _new_token(self) -> str:
        answer = self._metadata.ask(
            "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)},
            method="PUT",
        )
        if answer.status != 200 or not answer.text.isprintable():
            raise PollFailed(
                f"{AWS}: the metadata service gives no token ({answer.status}): "
                "allow IMDSv2, or set notices without aws"
            )
        return answer.text


class Gce:
    """Preemption notice of Google Compute Engine for this machine."""

    pause_s = 1.0

    def __init__(self, metadata: Metadata, wait_s: int = WAIT_S) -> None:
        self._metadata, self._wait_s, self._etag = metadata, wait_s, ""

    def __call__(self) -> list[Notice]:
        """Query once: first the current value, then wait for a change; see `polling`."""
        path, timeout_s = "/computeMetadata/v1/instance/preempted", TIMEOUT_S
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={self._wait_s}&last_etag={self._etag}"
            timeout_s += self._wait_s
        answer = self._metadata.ask(path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        _must_be_ok(GCE, answer)
        if answer.text not in ("TRUE", "FALSE"):
            raise PollFailed(f"{GCE}: neither TRUE nor FALSE: {answer.text[:200]!r}")
        self._etag = answer.etag if answer.etag.isalnum() else ""
        if answer.text == "FALSE":
            return []
        return [Notice(f"{GCE} preemption", seconds_left=GCE_LEFT_S)]


class Azure:
    """Scheduled Events of Azure: upcoming events for a set of machines, this one among them."""

    pause_s = 2.0

    def __init__(self, metadata: Metadata) -> None:
        self._metadata, self._name, self._timeout_s = metadata, "", FIRST_TIMEOUT_S

    def __call__(self) -> list[Notice]:
        """Ask the metadata service once. In the background."""
        self._name = self._name or self._own_name()
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = self._metadata.ask(path, {"Metadata": "true"}, timeout_s=self._timeout_s)
        _must_be_ok(AZURE, answer)
        self._timeout_s = TIMEOUT_S
        events = _object(AZURE, answer).get("Events")
        if not isinstance(events, list):
            raise PollFailed(f"{AZURE}: no list of events: {answer.text[:200]!r}")
        mine = [event for event in events if self._is_mine(event)]
        return [
            Notice(
                f"{AZURE} {event['EventType']}",
                seconds_left=_left_s(event.get("NotBefore"), answer.now_s),
            )
            for event in mine
        ]

    def _is_mine(self, event: Any) -> bool:
        if not isinstance(event, dict) or event.get("EventType") not in _AZURE_STOPS:
            return False
        resources = event.get("Resources")
        return isinstance(resources, list) and self._name in resources

    def _own_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = self._metadata.ask(path, {"Metadata": "true"})
        _must_be_ok(AZURE, answer)
        if not answer.text:
            raise PollFailed(f"{AZURE}: this machine has no name")
        return answer.text


Cloud: TypeAlias = "Aws | Gce | Azure"
CLOUDS: dict[str, Callable[[Metadata], Cloud]] = {"aws": Aws, "gce": Gce, "azure": Azure}
# Variables of the clouds' own tools for another metadata server.
ADDRESS_VARIABLES = {"aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT", "gce": "GCE_METADATA_HOST"}


def this_cloud(folder: Path = VENDOR_FILES) -> str | None:
    """Return the one of `CLOUDS` named by this machine's firmware, or None."""
    fields = dict.fromkeys(("sys_vendor", "product_name", "chassis_asset_tag", "bios_vendor"), "")
    for name in fields:
        with contextlib.suppress(OSError):
            fields[name] = (folder / name).read_text(encoding="utf-8", errors="replace").strip()
    if "Amazon EC2" in (fields["sys_vendor"], fields["bios_vendor"]):
        return "aws"
    if fields["product_name"] == "Google Compute Engine":
        return "gce"
    return "azure" if fields["chassis_asset_tag"] == _AZURE_TAG else None


def metadata_of(cloud: str, environment: Mapping[str, str]) -> Metadata:
    """Return the metadata server of a cloud."""
    return Metadata(environment.get(ADDRESS_VARIABLES.get(cloud, ""), "") or METADATA)


def _must_be_ok(cloud: str, answer: MetadataReply) -> None:
    if answer.status != 200:
        raise PollFailed(f"{cloud}: the metadata service answers {answer.status}")


def _object(cloud: str, answer: MetadataReply) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(answer.text)
        if isinstance(found, dict):
            return found
    raise PollFailed(f"{cloud}: no JSON object: {answer.text[:200]!r}")


def _left_s(text: Any, now_s: float) -> float | None:
    """Return the seconds until a time such as "2017-09-18T08:22:00Z" or "Mon, 19 Sep 2016
    18:29:47 GMT"."""
    if not isinstance(text, str) or not text:
        return None
    try:
        at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        at_s: float | None = at.timestamp()
    except (ValueError, OverflowError):
        at_s = _date(text)
    return None if at_s is None else min(max(at_s - now_s, 0.0), MOST_S)


def _date(text: str) -> float | None:
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
        return parsedate_to_datetime(text).timestamp()
    return None
