"""Spot notices, asked of a real HTTP server that refuses and answers as the clouds document it."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from tests.preemption.metadata_server import serving
from trainckpt.notice import Notice
from trainckpt.preemption.polling import PollFailed, PollingSource
from trainckpt.preemption.spot import Aws, Azure, Gce, Metadata, metadata_of, this_cloud


@pytest.fixture
def cloud():
    with serving() as cloud:
        yield cloud


def preempt(cloud, name: str = "worker_7", kind: str = "Preempt", in_s: float = 30.0) -> dict:
    return {
        "EventId": "1",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["other", name],
        "EventStatus": "Scheduled",
        "NotBefore": cloud.azure_time(in_s),
    }


# ---- AWS


def test_aws_is_asked_with_a_token_and_says_nothing_until_there_is_a_notice(cloud):
    aws = Aws(Metadata(cloud.url))
    assert aws() == []
    assert aws() == []
    assert cloud.asked == [
        "PUT /latest/api/token",
        *["GET /latest/meta-data/spot/instance-action"] * 2,
    ]
    cloud.action = json.dumps({"action": "terminate", "time": cloud.aws_time(120)})
    (notice,) = aws()
    assert notice.reason == "AWS spot terminate"
    assert notice.action == "stop"


def test_what_is_left_is_reckoned_by_the_clock_of_the_server(cloud):
    """Its clock is two months away from ours."""
    cloud.action = json.dumps({"action": "stop", "time": cloud.aws_time(120)})
    (notice,) = Aws(Metadata(cloud.url))()
    assert 0 < notice.seconds_left <= 121
    cloud.events = [preempt(cloud, in_s=60)]
    (notice,) = Azure(Metadata(cloud.url))()
    assert 0 < notice.seconds_left <= 61
    cloud.events = [preempt(cloud, in_s=-60)]
    assert Azure(Metadata(cloud.url))()[0].seconds_left == 0


def test_an_aws_token_that_is_too_old_is_replaced(cloud):
    aws = Aws(Metadata(cloud.url))
    aws()
    cloud.tokens.clear()
    with pytest.raises(PollFailed, match="401"):
        aws()
    assert aws() == []
    assert cloud.asked.count("PUT /latest/api/token") == 2


def test_an_aws_machine_that_gives_no_token_is_told_once_with_what_to_do(cloud):
    cloud.tokens = None
    with pytest.raises(PollFailed, match=r"no token.*IMDSv2"):
        Aws(Metadata(cloud.url))()


# ---- GCE


def test_gce_is_asked_once_and_then_waits_for_the_change(cloud):
    gce = Gce(Metadata(cloud.url), wait_s=30)
    assert gce() == []
    found = []
    waiting = threading.Thread(target=lambda: found.extend(gce()))
    waiting.start()
    while len(cloud.asked) < 2:
        assert waiting.is_alive()
        time.sleep(0.01)
    cloud.preempt()
    waiting.join(60)
    assert [(n.reason, n.seconds_left) for n in found] == [("GCE preemption", 30.0)]
    assert "wait_for_change=true&timeout_sec=30&last_etag=e5" in cloud.asked[1]


def test_gce_that_was_preempted_before_we_asked_is_not_waited_for(cloud):
    cloud.preempted = "TRUE"
    (notice,) = Gce(Metadata(cloud.url))()
    assert notice.reason == "GCE preemption"


# ---- Azure


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy", "Reboot"])
def test_azure_says_what_will_happen_to_this_machine(cloud, kind):
    cloud.events = [preempt(cloud, kind=kind)]
    (notice,) = Azure(Metadata(cloud.url))()
    assert notice.reason == f"Azure {kind}"


def test_azure_events_of_other_machines_and_short_freezes_are_not_ours(cloud):
    cloud.events = [preempt(cloud, name="worker_8"), preempt(cloud, kind="Freeze"), "?", None]
    azure = Azure(Metadata(cloud.url))
    assert azure() == []
    assert azure() == []
    assert sum("compute/name" in asked for asked in cloud.asked) == 1


def test_an_azure_event_that_has_begun_leaves_nobody_knows_how_long(cloud):
    cloud.events = [{**preempt(cloud), "EventStatus": "Started", "NotBefore": ""}]
    (notice,) = Azure(Metadata(cloud.url))()
    assert notice.seconds_left is None


# ---- all three


GARBAGE = [
    b"",
    b"\x00\xff\x00",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"action"',
    b"HTTP/1.1 500 No\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nDate: yesterday\r\n\r\n[1]",
    b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 99999,
    b'HTTP/1.1 200 OK\r\n\r\n{"action": 1, "time": "now", "Events": 3}',
]


@pytest.mark.parametrize("kind", [Aws, Gce, Azure])
def test_garbage_is_no_notice_and_no_other_error(cloud, kind):
    for bytes_ in GARBAGE:
        cloud.ill = None
        asker = kind(Metadata(cloud.url))
        asker()
        cloud.ill = bytes_
        with pytest.raises((OSError, PollFailed)):
            asker()
        with pytest.raises((OSError, PollFailed)):
            kind(Metadata(cloud.url))()


def test_a_server_that_does_not_answer_is_given_up():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        metadata = Metadata(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(OSError, match="timed out"):
            metadata.ask("/", {}, timeout_s=0.05)


def test_no_proxy_is_asked(cloud, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert Gce(Metadata(cloud.url))() == []


def test_the_firmware_says_which_cloud_this_is(tmp_path):
    assert this_cloud(tmp_path / "nowhere") is None
    for files, cloud in [
        ({"sys_vendor": "Amazon EC2"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gce"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "QEMU"}, None),
    ]:
        folder = tmp_path / str(cloud) / files.get("sys_vendor", "")
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
        assert this_cloud(folder) == cloud


def test_the_clouds_own_variables_say_where_their_server_is(cloud):
    found = metadata_of("aws", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": cloud.url})
    assert Aws(found)() == []
    found = metadata_of("gce", {"GCE_METADATA_HOST": cloud.url.removeprefix("http://")})
    assert Gce(found)() == []


def test_a_source_asks_until_there_is_a_notice_and_says_each_error_once(cloud):
    cloud.tokens = None
    said = []
    cloud_asks = Aws(Metadata(cloud.url))

    def ask():
        if len(cloud.asked) == 3:
            cloud.tokens = []
            cloud.action = json.dumps({"action": "stop", "time": cloud.aws_time(120)})
        return cloud_asks()

    source = PollingSource(ask, 0.001, said.append)
    source.start()
    assert source.fileno() is None
    while not (found := source.poll()):
        time.sleep(0.01)
    assert [notice.reason for notice in found] == ["AWS spot stop"]
    assert source.poll() == []
    assert len(said) == 1
    source.stop()


def test_an_answer_that_nobody_foresaw_does_not_deafen():
    """A driver that lacks a function, say; and an address that is none."""
    said, answers = [], iter([AttributeError("no nvmlEventSetWait_v2"), [Notice("GPU 0: late")]])

    def ask():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    source = PollingSource(ask, 0.001, said.append)
    source.start()
    while not (found := source.poll()):
        time.sleep(0.001)
    assert found == [Notice("GPU 0: late")]
    assert said == ["AttributeError: no nvmlEventSetWait_v2"]
    source.stop()
    with pytest.raises(PollFailed, match="does not speak HTTP: InvalidURL"):
        Metadata("http://169.254.169.254:imds").ask("/", {})


def test_a_source_that_is_stopped_asks_no_more():
    asked = threading.Semaphore(0)
    source = PollingSource(lambda: asked.release() or [], 0.001)
    source.start()
    asked.acquire()
    source.stop()
    source._thread.join(60)
    assert not source._thread.is_alive()


def test_a_source_that_is_suspended_asks_nothing_and_keeps_nothing_open():
    """Also one whose questions a notice has ended: it asks again when it is resumed."""
    asked, answer, closed = threading.Semaphore(0), threading.Semaphore(0), []
    notices: list[Notice] = []

    def ask():
        asked.release()
        assert answer.acquire(timeout=60)
        return notices

    source = PollingSource(ask, 0.001, close=lambda: closed.append(asked._value))
    source.start()
    asked.acquire()
    suspending = threading.Thread(target=source.suspend)
    suspending.start()
    suspending.join(0.02)
    assert closed == [], "a question is under way"
    answer.release()
    suspending.join(60)
    assert closed == [0]
    assert not asked.acquire(timeout=0.02)
    notices.append(Notice("AWS spot stop"))
    source.restart()
    for _ in range(2):
        assert asked.acquire(timeout=60)
        answer.release()
        source._thread.join(60)
        assert source.poll() == notices
        source.suspend()
        source.restart()
    source.stop()
    answer.release()
