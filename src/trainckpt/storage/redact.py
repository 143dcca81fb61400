"""Remove secrets from URLs and from library messages before they are shown.

    s3://key:secret@bucket/run?token=x   ->   s3://bucket/run
    AccountKey=abc==;EndpointSuffix=...  ->   AccountKey=<redacted>;EndpointSuffix=...

Credentials belong in the environment, but some users write them into URLs, and the signature of a
request is part of its query.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
_QUERY = re.compile(r"(?P<url>[a-z][a-z0-9+.-]*://[^\s?\"']*?)(?:\?|%3F)[^\s\"']*", re.IGNORECASE)
# In Azure's connection strings and signatures, in Google's logins and service accounts.
_NAMED = re.compile(
    r"(?P<name>\b(?:AccountKey|SharedAccessSignature|client_secret|private_key"
    r"|(?:access|refresh|id)_token)[\"']?\s*[=:]\s*[\"']?"
    r"|(?:[?&;]|%26)sig=|\bassertion[\"']?\s*[=:]\s*[\"']?(?=eyJ))[^\s\"';&,]+",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?P<name>\b(?:Bearer\s+|SharedKey\s+[^\s:]+:))[^\s\"']+", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END|\Z)", re.DOTALL)


def redacted(text: str) -> str:
    """Return `text` without user names, passwords and queries of its URLs, and without keys."""
    return keys_redacted(_QUERY.sub(r"\g<url>", _USER.sub("", text)))


def keys_redacted(text: str) -> str:
    """Return `text` with "<redacted>" for the values of keys, signatures and tokens."""
    text = _PRIVATE_KEY.sub("<redacted>", text)
    for secret in (_NAMED, _LOGIN):
        text = secret.sub(r"\g<name><redacted>", text)
    return text
