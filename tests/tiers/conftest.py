"""The S3 servers of a test session, started by the first test that asks for one."""

from __future__ import annotations

import pytest

from tests import s3_servers


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory):
    with s3_servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server():
    with s3_servers.moto() as server:
        s3_servers.make_bucket(server)
        yield server


@pytest.fixture
def at(monkeypatch):
    """Makes a server the one that clients in this process find."""

    def go(server, port=None):
        for name, value in server.environment(port).items():
            monkeypatch.setenv(name, value)

    return go
