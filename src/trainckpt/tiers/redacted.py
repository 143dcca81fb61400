"""What may be shown of a URL, and of what a library says about one.

    s3://key:secret@bucket/run?token=x   ->   s3://bucket/run
    AccountKey=abc==;EndpointSuffix=...  ->   AccountKey=<redacted>;EndpointSuffix=...

Credentials come from the environment; some write them into URLs all the same, and what signs a
request stands in its query.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
_QUERY = re.compile(r"(?P<url>[a-z][a-z0-9+.-]*://[^\s?\"']*?)(?:\?|%3F)[^\s\"']*", re.IGNORECASE)
# Of Azure's connection strings and signatures, of Google's logins and service accounts.
_NAMED = re.compile(
    r"(?P<name>\b(?:AccountKey|SharedAccessSignature|client_secret|private_key"
    r"|(?:access|refresh|id)_token)[\"']?\s*[=:]\s*[\"']?"
    r"|(?:[?&;]|%26)sig=|\bassertion[\"']?\s*[=:]\s*[\"']?(?=eyJ))[^\s\"';&,]+",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?P<name>\b(?:Bearer\s+|SharedKey\s+[^\s:]+:))[^\s\"']+", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END|\Z)", re.DOTALL)


def redacted(text: str) -> str:
    """`text` without user names, passwords and queries of the URLs in it, and without keys."""
    return keys_redacted(_QUERY.sub(r"\g<url>", _USER.sub("", text)))


def keys_redacted(text: str) -> str:
    """`text` without the values of keys, signatures and tokens; each leaves its mark."""
    text = _PRIVATE_KEY.sub("<redacted>", text)
    for secret in (_NAMED, _LOGIN):
        text = secret.sub(r"\g<name><redacted>", text)
    return text
