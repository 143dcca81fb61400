"""Azure's and Google's stores: each request fails in turn, what is said, and what is never said."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import traceback
from functools import partial
from itertools import cycle

import pytest
from azure.core.exceptions import HttpResponseError
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.cloud_servers import ACCOUNT_KEY
from tests.faults.s3_proxy import CUT, DROP, LOSE, proxy
from tests.faults.test_object_store import Clock
from trainckpt.errors import ConfigurationError, TierUnavailable, TrainckptError
from trainckpt.storage import gcs_client
from trainckpt.storage.azure_client import DROPPED, MARK
from trainckpt.storage.object_store import ObjectStoreTier, open_object_store
from trainckpt.storage.redact import redacted
from trainckpt.storage.retry import Limits, RetryPolicy
from trainckpt.storage.store_errors import StoreError

STEP = 256 << 10
AT_ONCE = {"first_pause_s": 0.0, "longest_pause_s": 0.0, "part_bytes": STEP}
PATIENT = Limits(**AT_ONCE, give_up_s=5.0, give_up_first_s=5.0)
HASTY = Limits(**AT_ONCE, give_up_s=0.0, give_up_first_s=0.0)
DATA = memoryview(random.Random(1).randbytes(2 * STEP + 12345))
CLOUDS = pytest.mark.parametrize(
    ("server", "url"), [("azurite_server", "az://bucket"), ("gcs_server", "gs://bucket")]
)


@pytest.fixture
def store(request, server, url, at):
    """A tier through a proxy, with these limits; and the proxy."""
    server = request.getfixturevalue(server)
    with proxy(server.port) as between:
        at(server, between.port)
        whole = open_object_store(f"{url}/{request.node.originalname}")

        def tier(limits, **how):
            calls = RetryPolicy(whole.url, limits, **how)
            return ObjectStoreTier(whole.name, whole.url, whole._client, whole._root, calls)

        yield tier, between


def write(tier, name):
    """A large object, in parts, a small one, and one that is created."""
    tier.write_parts(
        f"{name}/large", len(DATA), iter([(STEP + 7, DATA[STEP + 7 :]), (0, DATA[: STEP + 7])])
    )
    tier.write(f"{name}/small", [DATA[:100]])
    assert tier.create(f"{name}/created", b"mine")


def is_whole(tier, name):
    into = memoryview(bytearray(len(DATA)))
    tier.read_into(f"{name}/large", 0, into)
    return (
        into == DATA
        and tier.read(f"{name}/small", max_bytes=100) == DATA[:100]
        and tier.read(f"{name}/created", max_bytes=4) == b"mine"
        and tier.list(name) == ["created", "large", "small"]
    )


def requests_of(tier, between, name):
    assert tier.creates_only()
    between.reset()
    write(tier, name)
    return len(between.requests)


@CLOUDS
def test_what_one_request_meets_is_made_good(store):
    tier, between = store
    tier = tier(PATIENT)
    others = cycle([DROP, CUT, 500, 503])
    for number in range(1, requests_of(tier, between, "first") + 1):
        for fault in (LOSE, next(others)):
            name = f"{fault}-{number}"
            between.reset({number: fault}.get)
            write(tier, name)
            between.reset()
            assert is_whole(tier, name), (fault, number)
    assert not tier.create("first/created", b"mine")


@CLOUDS
def test_a_store_that_fails_from_a_request_on_keeps_nothing_of_what_was_not_finished(store):
    tier, between = store
    clock = Clock()
    total, faults = requests_of(tier(PATIENT), between, "first"), cycle([LOSE, LOSE, DROP, 503])
    client, root = tier(PATIENT)._client, tier(PATIENT)._root
    for first in range(1, total + 1):
        fault = next(faults)
        name = f"{fault}-{first}"
        hasty = tier(HASTY, clock=clock)
        assert hasty.creates_only()
        between.reset(lambda number, first=first, fault=fault: fault if number >= first else None)
        with pytest.raises(TrainckptError):
            write(hasty, name)
        between.reset()
        clock.go_on(60.0)
        hasty.replace(f"{name}/next", b"")  # what it could not be told, it is told now
        assert client.abort_uploads(root) == 0
        written = [each for each in hasty.list(name) if each != "next"]
        assert written in ([], ["large"], ["large", "small"], ["created", "large", "small"])
        if written:
            assert hasty.size(f"{name}/large") == len(DATA)


def test_a_created_name_is_ours_though_only_the_answer_to_its_creation_was_lost(moto_server, at):
    """On a connection that was used before: there aiohttp asks again by itself."""
    with proxy(moto_server.port) as between:
        at(moto_server, between.port)
        tier = open_object_store("s3://bucket/created", PATIENT)
        assert tier.creates_only()
        between.reset({1: LOSE}.get)
        assert tier.create("k", b"1")
        assert not tier.create("k", b"1")


@CLOUDS
def test_what_a_writer_breaks_off_is_dropped(store):
    tier, between = store
    tier = tier(PATIENT)

    def parts():
        yield 0, DATA[: 2 * STEP + 1]
        raise KeyError

    with pytest.raises(KeyError):
        tier.write_parts("broken", len(DATA), parts())
    assert tier.size("broken") is None
    assert tier.list("") == []
    assert between.requests[-3][0] == "DELETE"


@pytest.fixture
def two(azurite_server, at):
    """Two tiers of one place: one straight, one through a proxy; and the proxy."""
    at(azurite_server)
    straight = open_object_store("az://bucket/two")
    with proxy(azurite_server.port) as between:
        at(azurite_server, between.port)
        yield straight, open_object_store("az://bucket/two", PATIENT), between
    straight.remove_folder("")


def test_what_another_finishes_while_it_is_dropped_stays(two):
    straight, tier, between = two
    for key, delete in (("new", 2), ("half dropped", 3)):
        if delete == 3:
            straight._client.commit(straight._path(key), [], metadata={MARK: DROPPED})
        finish = partial(straight.replace, key, b"finished")
        between.reset(lambda n, delete=delete, finish=finish: finish() if n == delete else None)
        tier._client.drop(tier._path(key))
        assert [method for method, _ in between.requests][-1] == "DELETE"
        assert straight.read(key, max_bytes=99) == b"finished"


def test_writers_of_one_object_do_not_mix_their_blocks(two):
    straight, _, _ = two
    client, path = straight._client, straight._path("k")
    first, second, longer = (client.begin(path, STEP) for _ in range(3))
    for upload, data in ((first, b"1111"), (second, b"2222"), (longer, b"33333")):
        upload.part(1, data)
    first.complete()
    assert straight.read("k", max_bytes=4) == b"1111"
    second.complete()  # there is one of its size already
    with pytest.raises(HttpResponseError, match="InvalidBlockList"):
        longer.complete()
    assert straight.read("k", max_bytes=4) == b"1111"


def test_a_name_that_a_longer_record_took_meanwhile_is_not_ours(two):
    straight, tier, between = two
    assert tier.creates_only()

    def others(number):
        if number == 1:
            assert straight.create("k", b"another's, and longer")
            return 500
        return None

    between.reset(others)
    assert not tier.create("k", b"mine")


def test_a_block_whose_object_was_given_up_is_dropped_later(two):
    _, tier, between = two
    once = RetryPolicy(tier.url, Limits(give_up_s=0.0, give_up_first_s=0.0))
    tier = ObjectStoreTier(tier.name, tier.url, tier._client, tier._root, once)
    assert tier.size("k") is None
    between.reset({3: 500}.get)
    with pytest.raises(TierUnavailable):
        tier.write("k", [memoryview(bytes((1 << 20) + 1))])
    assert [method for method, _ in between.requests] == ["HEAD", "PUT", "PUT"]
    between.reset()
    tier.replace("next", b"")
    assert between.requests[-1][0] == "DELETE"
    assert tier.list("") == ["next"]


def test_an_upload_that_is_gone_is_not_taken_for_done_because_of_another_object(rclone_server, at):
    at(rclone_server)
    straight = open_object_store("s3://bucket/gone")
    assert straight.size("k") is None  # connected, before the proxy is the one that is found
    with proxy(rclone_server.port) as between:
        at(rclone_server, between.port)
        tier = open_object_store("s3://bucket/gone", PATIENT)

        def others(_):
            method, path = between.requests[-1]
            if method != "POST" or "uploadId" not in path or straight.size("k") is not None:
                return None
            assert straight._client.abort_uploads(straight._path("k")) == 1
            straight.replace("k", b"short")
            return DROP

        between.reset(others)
        with pytest.raises(TrainckptError):
            tier.write_parts("k", len(DATA), iter([(0, DATA)]))
        assert straight.read("k", max_bytes=99) == b"short"


SECRET = "c2VjcmV0LW9mLXRoZS10ZXN0cw=="
KEY_FILE = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"bad: AccountName=a;AccountKey={SECRET};BlobEndpoint=http://x/a;", "AccountName=a"),
        (f"https://a.blob.core.windows.net/c/k?sv=2024&sig={SECRET}: no", "https://a.blob.core"),
        (f"signed by sv=2024&sig={SECRET}", "sv=2024"),
        (f"Authorization: SharedKey a:{SECRET}", "SharedKey a:"),
        (f"Bearer {SECRET} has expired", "has expired"),
        (f'{{"client_email": "a@b", "private_key": "{KEY_FILE}"}}', "a@b"),
        (f'{{"refresh_token": "{SECRET}", "type": "authorized_user"}}', "authorized_user"),
    ],
)
def test_what_signs_is_not_shown(text, shown):
    found = redacted(text)
    assert shown in found
    assert SECRET not in found
    assert "MII" not in found


def said_by(url, act):
    """All that is said of a failure, also by Python where nobody catches it."""
    with pytest.raises(TrainckptError) as caught:
        act(open_object_store(url, HASTY))
    error = caught.value
    return f"{error.message}; {error.hint}", "".join(traceback.format_exception(error))


def test_azures_refusals_say_what_to_do_and_no_secret(azurite_server, at, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    at(azurite_server)
    told = azurite_server.environment()["AZURE_STORAGE_CONNECTION_STRING"]
    cases = [
        (told, "az://nowhere/run", "make the bucket (Azure: the container)"),
        (told.replace(ACCOUNT_KEY, SECRET), "az://bucket/run", "Storage Blob Data Contributor"),
        (
            told.replace(str(azurite_server.port), "9"),
            "az://bucket/run",
            "this host reaches the store",
        ),
        (f"AccountKey={SECRET}", "abfs://bucket/run", "AZURE_STORAGE_CONNECTION_STRING"),
        (told, "abfs://bucket@other.dfs.core.windows.net/run", "names the account other"),
        (told, "abfs://bucket@other.dfs.core.example.com/run", "names the host other"),
        (told, "az://bucket@other/run", "names the host other"),
        (told, f"az://bucket/run?sv=2024&sig={SECRET}", "a query in the URL"),
    ]
    for connection, url, expected in cases:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        shown, trace = said_by(url, lambda tier: tier.size("k"))
        assert expected in shown
        for secret in (ACCOUNT_KEY, SECRET):
            assert secret not in trace + shown + caplog.text, url
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "a")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2024&sig={SECRET}")
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    shown, trace = said_by("az://bucket/run", lambda tier: tier.replace("k", b"1"))
    assert "a.blob.core.windows.net" in shown
    assert SECRET not in trace + shown + caplog.text


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("az://bucket/run", "adlfs", "azure"), ("gs://bucket/run", "gcsfs.core", "gcs")],
)
def test_what_is_missing_is_said_with_the_line_that_installs_it(url, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match="is not installed") as caught:
        open_object_store(url)
    assert caught.value.hint == f'pip install "trainckpt[{extra}]"'


FORKS = """
import os, sys
from trainckpt.storage.object_store import open_object_store
tier = open_object_store(sys.argv[1])
tier.replace("k", b"1")
child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


@CLOUDS
def test_a_process_that_was_forked_after_a_store_was_asked_ends_without_a_word(
    server, url, request, at
):
    at(request.getfixturevalue(server))
    command = [sys.executable, "-c", FORKS, f"{url}/forks"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def no_network(*_, **__):
    raise OSError("no network in this test")


def test_googles_refusals_say_what_to_do(gcs_server, at, monkeypatch, tmp_path):
    at(gcs_server)
    shown, _ = said_by("gs://nowhere/run", lambda tier: tier.size("k"))
    assert "make the bucket" in shown
    shown, _ = said_by("gs://nowhere/run", lambda tier: tier.replace("k", b""))
    assert "make the bucket" in shown
    key = tmp_path / "key.json"
    key.write_text(json.dumps({"type": "service_account", "private_key": KEY_FILE}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with proxy(gcs_server.port) as between:
        at(gcs_server, between.port)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
        between.reset(lambda _: 401)
        shown, trace = said_by("gs://bucket/run", lambda tier: tier.size("k"))
    assert "roles/storage.objectUser" in shown
    assert "MII" not in trace + shown


@pytest.mark.parametrize(("server", "url"), [("gcs_server", "gs://bucket")])
def test_a_page_of_somebody_between_is_no_answer_of_googles(store):
    tier, between = store
    tier = tier(HASTY)
    write(tier, "first")  # once it is also asked whether there is such a bucket
    for number in range(1, requests_of(tier, between, "second") + 1):
        for status in (200, 302):
            name = f"{status}-{number}"
            between.reset({number: status}.get)
            with pytest.raises(TierUnavailable, match=f"{status} "):
                write(tier, name)
            between.reset(lambda _: 302)
            with pytest.raises(TierUnavailable, match="302 "):
                tier.remove("first/small")
    between.reset()
    assert is_whole(tier, "first")


def test_a_login_that_could_not_be_renewed_just_now_is_tried_again(
    gcs_server, at, monkeypatch, tmp_path
):
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    how = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    account = tmp_path / "account.json"
    with proxy(gcs_server.port) as between:
        at(gcs_server)
        key = {
            "type": "service_account",
            "client_email": "a@b",
            "project_id": "p",
            "private_key": made.private_bytes(*how).decode(),
            "token_uri": f"http://127.0.0.1:{between.port}/token",
        }
        account.write_text(json.dumps(key))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(account))
        for fault, expected in ((503, "tried 1 times"), (DROP, "tried 1 times"), (401, "401")):
            between.reset(lambda _, fault=fault: fault)
            shown, _ = said_by("gs://bucket/run", lambda tier: tier.size("k"))
            assert between.requests[0] == ("POST", "/token")
            assert expected in shown, fault
            assert ("tried 1 times" in shown) is (fault != 401)


def test_an_upload_of_which_the_store_takes_nothing_is_given_up():
    """It answers each time that it has no byte yet."""
    asked = []

    class Idle:
        def ask(self, *request, **_):
            asked.append(request)
            return gcs_client._Answer(gcs_client.INCOMPLETE, {}, b"")

    upload = gcs_client._ResumableUpload(Idle(), "https://store/session")
    upload.part(1, b"x" * 9)
    with pytest.raises(StoreError, match="takes no more than 0 bytes"):
        upload.complete()
    assert len(asked) == gcs_client.MOST_IDLE + 1
