"""What may be shown of a URL, and of what a library says about one.

    s3://key:secret@bucket/run?token=x   ->   s3://bucket/run

Credentials come from the environment; some write them into URLs all the same, and what signs a
request stands in its query.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
_QUERY = re.compile(r"(?P<url>[a-z][a-z0-9+.-]*://[^\s?\"']*?)(?:\?|%3F)[^\s\"']*", re.IGNORECASE)


def redacted(text: str) -> str:
    """`text` without user names, passwords and queries of the URLs in it."""
    return _QUERY.sub(r"\g<url>", _USER.sub("", text))
