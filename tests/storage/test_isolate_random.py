"""The random generators of a script stay as they are, whatever the libraries of a store draw."""

from __future__ import annotations

import http.server
import json
import random
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.s3_servers import KEY, SECRET
from trainckpt.storage.object_store import open_object_store

pytest.importorskip("s3fs")
ROLE = "a-role"


class _Instance(http.server.BaseHTTPRequestHandler):
    """The credentials of a cloud instance, near their end: they are fetched before each request."""

    def do_PUT(self):
        self._answer("a token")

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.endswith(ROLE):
            end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
            self._answer(
                json.dumps(
                    {"AccessKeyId": KEY, "SecretAccessKey": SECRET, "Token": "", "Expiration": end}
                )
            )
        else:
            self._answer(ROLE)

    def _answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def instance():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Instance)
    server.daemon_threads, server.asked = True, []
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def generators():
    kept = torch.get_rng_state(), np.random.get_state()[1]
    return random.getstate(), *(each.tolist() for each in kept)


def test_credentials_that_are_fetched_beside_training_draw_nothing_from_its_generators(
    rclone_server, at, monkeypatch
):
    at(rclone_server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with instance() as found:
        where = f"http://127.0.0.1:{found.server_address[1]}"
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", where)
        before = generators()
        tier = open_object_store("s3://bucket/own-random")
        tier.replace("a", b"b")
        assert tier.read("a", max_bytes=1) == b"b"
    assert any(path.endswith(ROLE) for path in found.asked)
    assert generators() == before


def test_a_draw_of_a_library_is_no_draw_of_the_script():
    import botocore.retryhandler

    open_object_store("s3://bucket/own-random")
    before = random.getstate()
    assert 0 <= botocore.retryhandler.delay_exponential("rand", 2, 1) <= 1
    assert random.getstate() == before
