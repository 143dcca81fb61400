"""Real S3 servers for tests: rclone's, over a directory, and moto's, which can create only.

Each listens on a port of its own choosing, and ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KEY, SECRET = "trainckpt-tests-access", "trainckpt-tests-secret"
BUCKET = "bucket"
_PORT = re.compile(rb"http://127\.0\.0\.1:(\d+)")
_MOTO = """
import logging, sys, threading
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
# It looks for the object and then writes it: without a lock two creators win now and then.
lock, put = threading.Lock(), S3Response.put_object
def put_alone(response):
    with lock:
        return put(response)
S3Response.put_object = put_alone
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://127.0.0.1:%d" % server.get_host_and_port()[1], file=sys.stderr, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Server:
    """A server that is running.

    Attributes:
        process: Its.
        port: On 127.0.0.1.
        folder: What stands in it as files; None: it keeps everything in its memory.
    """

    process: subprocess.Popen
    port: int
    folder: Path | None = None

    def environment(self, port: int | None = None) -> dict[str, str]:
        """How a client finds it, by the port of a proxy if one is given."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


@contextmanager
def rclone(folder: Path):
    """A server of the buckets that are directories in `folder`."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("rclone")
    command = [
        program,
        "serve",
        "s3",
        "--addr",
        "127.0.0.1:0",
        "--auth-key",
        f"{KEY},{SECRET}",
        "--config",
        os.devnull,
        "-v",
        str(folder),
    ]
    with running(command) as (process, port):
        yield Server(process, port, folder)


@contextmanager
def moto():
    """A server without anything in it."""
    with running([sys.executable, "-c", _MOTO]) as (process, port):
        yield Server(process, port)


@contextmanager
def running(command, env=None):
    """The process of a server, and the port that it says it listens on."""
    process = subprocess.Popen(
        command,
        env=env,
        preexec_fn=_end_with_parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said = b""
        for line in process.stdout:
            said += line
            if found := _PORT.search(line):
                break
        else:
            raise AssertionError(f"the server did not start: {said.decode()}")
        # What it says later is not read: give it a place that never fills.
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        try:
            yield process, int(found[1])
        finally:
            process.kill()
            process.wait()
            drain.wait()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def make_bucket(server):
    """Make the bucket that tests use."""
    import boto3

    found = server.environment()
    boto3.client(
        "s3",
        endpoint_url=found["AWS_ENDPOINT_URL"],
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=found["AWS_DEFAULT_REGION"],
    ).create_bucket(Bucket=BUCKET)
