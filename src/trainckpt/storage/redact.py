"""Remove secrets from URLs, messages and commands before they are shown or stored.

    s3://key:secret@bucket/run?token=x   ->   s3://bucket/run
    AccountKey=abc==;EndpointSuffix=...  ->   AccountKey=<redacted>;EndpointSuffix=...
    --api-key=abc                        ->   --api-key=<redacted>

`redacted` is for URLs of stores and the messages of their libraries: credentials belong in the
environment, but some users write them into URLs, and the signature of a request is part of its
query. `redact_text` and `redact_arguments` are for all that the user typed: variables and arguments
named like a key, token, secret, password or credential keep their name and lose their value,
wherever such a pair stands in a text; so do passwords in URLs and values that look like the keys of
known services.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

REDACTED = "<redacted>"
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
_WORDS = (
    r"(?:(?:api|access|private|secret|encryption|auth|signing|ssh)?[-_]?key"
    r"|(?:access|api|auth|bearer|refresh|session)?[-_]?token|secret|\w*passw(?:or)?d|pwd"
    r"|passphrase|credentials?|auth|cookie)"
)
# Whole words: `--max-tokens` and `--tokenizer` are no secrets, `HF_TOKEN` and `hub.token` are.
_SECRET = re.compile(rf"(?:^|[^A-Za-z0-9]){_WORDS}(?:$|[-_.](?:id|file)?$)", re.IGNORECASE)
_CAMEL_SECRET = re.compile(r"[a-z](?:Key|Token|Secret|Password|Credentials?)$")
# The same as `name=value` or `"name": "value"` somewhere in a text.
_PAIR = re.compile(
    rf"((?:^|[\s;&?,{{\[\"'])[-\w.]*?(?<![A-Za-z0-9]){_WORDS}(?:[-_.]id)?"
    r"(?:[\"']\s*[=:]\s*[\"']?|[=:](?=\S)[\"']?))[^\s\"'&,;}\]]+",
    re.IGNORECASE,
)
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # of terminals
_BEARER = re.compile(r"\b((?:Bearer|Basic)\s+)[-\w.~+/=]{8,}", re.IGNORECASE)
# A user, with or without a password; but Azure's abfs://container@account holds neither.
_URL_SECRET = re.compile(
    r"(?<=://)(?:(?<!abfs://)(?<!abfss://)(?<!az://)[^/?#\s]+|[^/?#\s:@]*:[^/?#\s]+)(?=@)"
)
_KNOWN_KEY = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|AIza|eyJ)[-\w]{12,}"
    r"(?:\.[-\w]+)*"
)


def redacted(text: str) -> str:
    """Return `text` without user names, passwords and queries of its URLs, and without keys."""
    return _keys_redacted(_QUERY.sub(r"\g<url>", _USER.sub("", text)))


def redact_text(text: str) -> str:
    """Replace the secrets in a text: pairs, passwords in URLs, well-known keys."""
    text = _keys_redacted(_URL_SECRET.sub(REDACTED, text))
    text = _PAIR.sub(rf"\g<1>{REDACTED}", text)
    text = _BEARER.sub(rf"\g<1>{REDACTED}", text)
    return _KNOWN_KEY.sub(REDACTED, text)


def one_line(text: object, longest: int = 500) -> str:
    """Return a text to show in one line: no secrets, and nothing that moves a terminal's cursor."""
    shown = _ESCAPES.sub("", str(text)[: 4 * longest])
    return redact_text("".join(each if each.isprintable() else " " for each in shown))[:longest]


def redact_arguments(argv: Sequence[str]) -> list[str]:
    """Return the command, with the value of every secret-sounding option replaced."""
    shown, hide_next = [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = bool(equals or name.startswith("-")) and is_secret(name)
        if hide_next and not argument.startswith("--"):
            shown.append(REDACTED)
        elif secret and equals:
            shown.append(f"{redact_text(name)}={REDACTED}")
        else:
            shown.append(redact_text(argument))
        hide_next = secret and not equals
    return shown


def is_secret(name: str) -> bool:
    """Return True for a name of a variable or argument that sounds like a secret."""
    return _SECRET.search(name) is not None or _CAMEL_SECRET.search(name) is not None


def _keys_redacted(text: str) -> str:
    """Return `text` with "<redacted>" for the values of keys, signatures and tokens."""
    text = _PRIVATE_KEY.sub(REDACTED, text)
    for secret in (_NAMED, _LOGIN):
        text = secret.sub(rf"\g<name>{REDACTED}", text)
    return text
