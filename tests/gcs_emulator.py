"""gcp-storage-emulator, with what it lacks of Google's protocol:

- `ifGenerationMatch=0` refuses to create what is there (412), but in the bucket `lenient`;
- an upload may be empty.

It prints its address, and ends when stdin does.
"""

from __future__ import annotations

import logging
import sys
from http import HTTPStatus

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers import objects

BUCKETS = ("bucket", "lenient")
_insert = objects.insert


def insert(request, response, storage, *args, **kwargs):
    bucket = request.params["bucket_name"]
    conditional = request.query.get("ifGenerationMatch") == ["0"] and bucket != "lenient"
    if conditional and request.query["name"][0] in storage.objects.get(bucket, {}):
        response.status = HTTPStatus.PRECONDITION_FAILED
        why = "At least one of the pre-conditions you specified did not hold."
        error = {"reason": "conditionNotMet", "message": why}
        response.json({"error": {"code": 412, "message": why, "errors": [error]}})
        return
    _insert(request, response, storage, *args, **kwargs)


def _data(request, read=emulator.Request.data.fget):
    data = read(request)
    return b"" if data is None else data


def main():
    logging.disable(logging.CRITICAL)
    emulator.Request.data = property(_data)
    handlers = {id(_insert): insert}
    emulator.HANDLERS = tuple(
        (pattern, {method: handlers.get(id(call), call) for method, call in calls.items()})
        for pattern, calls in emulator.HANDLERS
    )
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKETS[0])
    emulator.buckets.create_bucket(BUCKETS[1], server._storage)
    server.start()
    port = server._api._httpd.server_address[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
