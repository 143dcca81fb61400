"""What is encrypted: manifests, whose every word is proven, and files; keys; heads of parity files.

The snapshot is that of tests/golden, which has a key. Whoever changes it has none, but whatever is
no secret fits: the manifest's own digest, lengths that agree with each other.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.fuzz.engine import Parser
from tests.fuzz.snapshots import D, sealed
from tests.fuzz.texts import as_text, text_of
from trainckpt.encryption import keys
from trainckpt.encryption.encrypted_file import FOOTER_BYTES
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import parity_file
from trainckpt.snapshot.decrypting_tier import DecryptingTier, KeyRing
from trainckpt.storage.local import LocalTier

REFUSALS = (TrainckptError,)
GOLDEN = Path(__file__).parents[1] / "golden" / "v4"
FOLDER, FILE = "snapshots/s2m1~1.2", "rank00000.safetensors"
KEY = f"{FOLDER}/{FILE}"
OPENER = KeyRing(str(GOLDEN / "identity"))
DATA = (GOLDEN / "one" / FOLDER / "manifest.json").read_bytes()
STORED = (GOLDEN / "one" / KEY).read_bytes()
MANIFEST = manifests.load(DATA, "golden")
_FIELDS = {
    "magic": (0, 16),
    "version": (16, 4),
    "chunk": (20, 4),
    "head": (24, 8),
    "body": (32, 8),
    "salt": (40, 24),
}
_FOOTER = {
    name: int.from_bytes(STORED[at - FOOTER_BYTES :][:size], "little")
    for name, (at, size) in _FIELDS.items()
}


class _Tier(LocalTier):
    """The golden run, with other bytes in the place of one file."""

    def __init__(self, data):
        super().__init__(GOLDEN / "one")
        self._data = data

    def size(self, key):
        return len(self._data) if key == KEY else super().size(key)

    def read_parts(self, key, parts, done=lambda number: None):
        if key != KEY:
            super().read_parts(key, parts, done)
            return
        for number, (first_byte, into) in enumerate(parts):
            found = self._data[first_byte : first_byte + len(into)]
            if first_byte < 0 or len(found) != len(into):
                raise UnusableSnapshot(f"{key} ends too early")
            into[:] = found
            done(number)


def _plain(data):
    """The whole file as it was, read by whoever has the key; the manifest fits its length."""
    opened = DecryptingTier(_Tier(data), OPENER)
    entry = opened.admit(MANIFEST).files[0]
    opened._sealed[KEY] = replace(entry, num_bytes=len(data)), *opened._sealed[KEY][1:]
    into = memoryview(bytearray(entry.content.num_bytes))
    opened.read_into(KEY, 0, into)
    return bytes(into)


PLAIN = _plain(STORED)


def run_sealed(data):
    assert _plain(data) == PLAIN, "something else was read than was written"


def spell_file(tree, rng):
    """The file, with other numbers at its end, other bytes somewhere, and cut."""
    tree = tree if isinstance(tree, dict) else {}
    footer, data = tree.get("footer"), bytearray(STORED)
    for name, (at, size) in _FIELDS.items():
        number = footer.get(name) if isinstance(footer, dict) else None
        if type(number) is int:
            first = len(data) - FOOTER_BYTES + at
            data[first : first + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    for change in tree.get("flips") if isinstance(tree.get("flips"), list) else ():
        if type(change) is int:
            data[change % len(data)] ^= 1 << (change % 8)
    cut = tree.get("cut")
    return bytes(data[: cut % (len(data) + 1)] if type(cut) is int and cut else data)


def run_encrypted(data):
    found = manifests.load(data, "it")
    if found.encryption is None:
        return  # whoever encrypts takes it from nobody: `choice.must_be_sealed`
    opened = DecryptingTier(LocalTier(GOLDEN / "one"), OPENER).admit(found)
    assert manifests.bound(found) == manifests.bound(MANIFEST), "what was forged was proven"
    assert opened.files[0].content.num_bytes == len(PLAIN)


def run_keys(data):
    text = text_of(data)
    if text.startswith(keys.RECIPIENT):
        assert keys.to_text(keys.RECIPIENT, keys.public_bytes(text)) == text, "two spellings"
    else:
        assert keys.to_text(keys.IDENTITY, keys._from_text(keys.IDENTITY, text)) == text


def run_parity(data):
    head = parity_file.load(data, "it")
    assert head.place < len(head.members)
    assert 0 < head.num_parity < len(head.members)
    assert head.num_own <= len(head.members)
    assert parity_file.load(parity_file.dump(head), "it") == head


_PARITY = {
    "format": 1,
    "snapshot": "s2~1.2",
    "number": 3,
    "members": [0, 2, 5],
    "num_own": 2,
    "num_parity": 1,
    "place": 2,
    "chunk_bytes": 700,
    "parities": D,
}
_MANIFEST = json.loads(DATA)
_WORDS = (
    *_MANIFEST,
    *_MANIFEST["encryption"],
    *_MANIFEST["encryption"]["keys"],
    _MANIFEST["encryption"]["sealed"],
    "AES-256-GCM",
    "AAAA",
    "",
)
_KEY = bytes(range(32))

PARSERS = {
    "encrypted": Parser("encrypted", run_encrypted, [_MANIFEST], sealed, _WORDS, REFUSALS),
    "sealed": Parser(
        "sealed",
        run_sealed,
        [{"footer": _FOOTER, "flips": [], "cut": 0}],
        spell_file,
        ("footer", "flips", "cut", *_FOOTER),
        REFUSALS,
    ),
    "keys": Parser(
        "keys",
        run_keys,
        [keys.to_text(kind, _KEY) for kind in (keys.RECIPIENT, keys.IDENTITY)],
        as_text,
        (),
        REFUSALS,
    ),
    "parity": Parser("parity", run_parity, [_PARITY], sealed, tuple(_PARITY), REFUSALS),
}
