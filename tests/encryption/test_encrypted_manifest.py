from __future__ import annotations

from dataclasses import replace

import pytest

from trainckpt.encryption import encrypted_file, keys
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format.cursor import Cursor
from trainckpt.format.layout import replicated
from trainckpt.format.manifest import FileEntry, Manifest, Plain, TensorEntry
from trainckpt.format.names import SnapshotName

KEY, D, E = bytes(range(32)), "0" * 32, "f" * 32
NAME, OLDER = "s2~1.2", "s1~1.1"
ME = keys.generate()


def sealed(**changes):
    plain = Plain(8000, E)
    files = [FileEntry(f"rank0000{r}.safetensors", 9000, D, D, True, plain) for r in range(2)]
    reached = [replace(file, name=f"{OLDER}/{file.name}") for file in reversed(files)]
    one, other = replicated(2), replicated(2).respelled(1)
    tensors = {  # neither by name nor by layout in order
        "b": TensorEntry("F32", (4,), one),
        "c": TensorEntry("F32", (4,)),
        "a": TensorEntry("F32", (4,), other),
    }
    manifest = Manifest(
        "run",
        SnapshotName.parse(NAME),
        None,
        Cursor(step=2),
        2,
        files,
        tensors,
        1.5,
        reason="test",
        reached=tuple(reached),
        **changes,
    )
    wrapped = {n: keys.wrap_for_all(KEY, [ME.recipient], "run", n) for n in (OLDER, NAME)}
    return encrypted_file.encrypt_manifest(manifest, KEY, wrapped)


def loaded():
    return manifests.load(manifests.dump(sealed()), "x")


def test_it_is_read_back_locked_and_opened_with_the_key():
    found = loaded()
    assert found.is_locked
    assert all(file.sealed and file.plain is None for file in (*found.files, *found.reached))
    assert found.files[0].content == Plain(9000, D)
    opened = encrypted_file.decrypt_manifest(found, KEY)
    assert not opened.is_locked
    assert {file.content for file in (*opened.files, *opened.reached)} == {Plain(8000, E)}
    assert manifests.dump(opened) == manifests.dump(found) == manifests.dump(loaded_again(found))


def loaded_again(manifest):
    return manifests.load(manifests.dump(manifest), "x")


def test_digests_of_what_it_was_stand_nowhere_in_it():
    text = manifests.dump(sealed())
    assert E.encode() not in text
    assert b"8000" not in text


CHANGES = {
    "run": "another",
    "parent": "s1~1.0",
    "created": 2.5,
    "tags": ("best",),
    "reason": "final",
    "writer": "somebody",
    "fingerprint": {"torch": "3"},
    "cursor": Cursor(step=2, samples=9),
    "window": Cursor(step=2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_field_that_is_changed_is_found(what):
    with pytest.raises(UnusableSnapshot, match="was changed"):
        encrypted_file.decrypt_manifest(replace(loaded(), **{what: CHANGES[what]}), KEY)


def test_changed_files_and_tensors_are_found():
    good = loaded()
    files = (replace(good.files[0], header_digest=E), *good.files[1:])
    reached = (replace(good.reached[0], digest=E), *good.reached[1:])
    tensors = {**good.tensors, "a": good.tensors["b"]}
    for change in (
        {"files": files},
        {"reached": reached},
        {"tensors": tensors},
        {"reached": good.reached[:1]},
    ):
        with pytest.raises(UnusableSnapshot, match="was changed"):
            encrypted_file.decrypt_manifest(replace(good, **change), KEY)


def test_another_key_or_a_changed_seal_does_not_open_it():
    good = loaded()
    with pytest.raises(UnusableSnapshot):
        encrypted_file.decrypt_manifest(good, bytes(32))
    for at in range(0, len(good.encryption.sealed), 7):
        data = bytearray(good.encryption.sealed)
        data[at] ^= 1
        bad = replace(good, encryption=replace(good.encryption, sealed=bytes(data)))
        with pytest.raises(UnusableSnapshot):
            encrypted_file.decrypt_manifest(bad, KEY)


def test_other_recipients_leave_it_as_it_is():
    good = loaded()
    wrapped = keys.wrap_for_all(KEY, [keys.generate().recipient], "run", NAME)
    other = replace(good, encryption=replace(good.encryption, keys={NAME: wrapped, OLDER: wrapped}))
    assert not encrypted_file.decrypt_manifest(loaded_again(other), KEY).is_locked
