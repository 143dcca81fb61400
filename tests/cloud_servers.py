"""Servers that speak the protocols of Azure's and Google's stores: Azurite, and an emulator.

Each listens on a port of its own choosing, keeps everything in its memory, and ends with the
process that started it. Azurite is Microsoft's; `make azurite` installs it where there is npm.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from tests.s3_servers import BUCKET, Server, running

AZURITE = Path(__file__).parents[1] / ".venv/azurite/node_modules/azurite/dist/src/blob/main.js"
ACCOUNT, ACCOUNT_KEY = "trainckpttests", base64.b64encode(b"trainckpt-tests-secret" * 2).decode()


class AzuriteServer(Server):
    def environment(self, port: int | None = None) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{port or self.port}/{ACCOUNT}"
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;"
            f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};BlobEndpoint={endpoint};"
        }


class GcsServer(Server):
    def environment(self, port: int | None = None) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port or self.port}",
            "NO_GCE_CHECK": "true",  # nobody asks for the machine's role
            "GOOGLE_APPLICATION_CREDENTIALS": os.devnull,
        }


def why_no_azurite() -> str:
    """Why there is none here; "" if there is."""
    if importlib.util.find_spec("adlfs") is None:
        return 'adlfs is not installed: pip install "trainckpt[azure]"'
    if not AZURITE.exists():
        return "Azurite is not installed: `make azurite`, which needs npm, or root and apt"
    return "" if shutil.which("node") else "Azurite needs node"


def why_no_gcs() -> str:
    """Why there is no emulator here; "" if there is."""
    for module in ("gcsfs", "gcp_storage_emulator"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    return ""


@contextmanager
def azurite():
    """A server with an empty container."""
    command = [
        shutil.which("node"),
        AZURITE,
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--disableTelemetry",
        "--silent",
        "--skipApiVersionCheck",
    ]
    accounts = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}
    with running(command, accounts) as (process, port):
        server = AzuriteServer(process, port)
        make_container(server)
        yield server


@contextmanager
def gcs_emulator():
    """A server with empty buckets: `bucket`, and `lenient`, which creates what is there."""
    with running([sys.executable, "-m", "tests.gcs_emulator"]) as (process, port):
        yield GcsServer(process, port)


def make_container(server):
    from azure.storage.blob import BlobServiceClient

    told = server.environment()["AZURE_STORAGE_CONNECTION_STRING"]
    with BlobServiceClient.from_connection_string(told) as client:
        client.create_container(BUCKET)
