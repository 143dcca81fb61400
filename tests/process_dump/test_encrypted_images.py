"""Dumps whose images are encrypted."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.process_dump.example import Example, dumped_at_a_boundary
from tests.process_dump.test_refusals import NAME, Counting
from tests.process_dump.test_restore import RECORD
from trainckpt.encryption import keys
from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.digest import digest
from trainckpt.format.dump import DumpRecord, Image
from trainckpt.process_dump import encrypted_images

FILES = {"core-1.img": b"", "pages-1.img": os.urandom((2 << 20) + 5), "files.img": b"secret" * 9}


def stored(images, **more):
    found = [(path.name, path.read_bytes()) for path in sorted(images.iterdir())]
    return replace(RECORD, images=tuple(Image(n, len(d), digest(d)) for n, d in found), **more)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def test_images_are_encrypted_where_they_lie_and_opened_by_whoever_has_a_key(images):
    ours, other = keys.generate(), keys.generate()
    wrapped = encrypted_images.encrypt(images, RECORD.run, RECORD.name, [ours.recipient])
    record = stored(images, keys=wrapped)
    assert DumpRecord.load(record.dump(), "x") == record
    assert b"secret" not in (images / "files.img").read_bytes()
    key = encrypted_images.key_of(record, [ours])
    with encrypted_images.opened(images, record, key) as plain:
        assert {path.name: path.read_bytes() for path in plain.iterdir()} == FILES
        assert {path.stat().st_mode & 0o777 for path in (plain, *plain.iterdir())} == {0o700, 0o600}
    assert not plain.exists()
    with pytest.raises(ConfigurationError, match="and no identity is given"):
        encrypted_images.key_of(record, [])
    with pytest.raises(ConfigurationError, match="the identity given is of"):
        encrypted_images.key_of(record, [other])
    moved = replace(record, run="another")
    with pytest.raises(UnusableSnapshot, match="was changed, or is another's"):
        encrypted_images.key_of(moved, [ours])

    def refused(change, why):
        before = (images / "pages-1.img").read_bytes()
        (images / "pages-1.img").write_bytes(change(before))
        with (
            pytest.raises(UnusableSnapshot, match=why),
            encrypted_images.opened(images, record, key),
        ):
            pass
        assert not plain.exists()
        (images / "pages-1.img").write_bytes(before)

    refused(lambda data: bytes([data[0] ^ 1]) + data[1:], "not what was encrypted for this place")
    refused(lambda data: data[:-1], "does not end as an encrypted file does")
    refused(lambda data: data[: 1 << 20] + data[2 << 20 :], "was cut")
    refused(lambda _: (images / "files.img").read_bytes(), "not what was encrypted for this place")


def test_an_encrypted_dump_of_a_process_holds_nothing_in_the_clear_and_is_restored(
    criu_here, tmp_path, monkeypatch
):
    monkeypatch.setenv("A_SECRET", "kept-" * 3 + "to-itself")
    ours = keys.generate()
    counting = Counting(tmp_path, criu_here.program, criu_here.version, bare=False)
    try:
        assert counting.counts_on()
        order = replace(counting.order(), recipients=(ours.recipient,))
        monkeypatch.setattr(counting, "order", lambda: order)
        record = counting.dump()
        folder = counting.tier.root / NAME.folder
        for path in (folder / "images").iterdir():
            assert b"kept-kept-" not in path.read_bytes(), path.name
        with pytest.raises(UnusableSnapshot, match="not what was encrypted for this place"):
            counting.restore(record, key=bytes(32))
        counting.restore(record, key=encrypted_images.key_of(record, [ours]))
        assert counting.counts_on()
        assert not (folder / encrypted_images.OPENED).exists()
    finally:
        counting.end()


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_encrypted_dump_is_restored_by_whoever_has_the_identity(criu_here, tmp_path, again):
    """Restored processes fail once and are launched again, and at last lose an image; a copy of
    their dump in a slower tier, as earlier versions made it, is left alone.

    `again`: they are dumped before that, too.
    """
    secret, hold, fails, far = "kept-" * 3, *(tmp_path / n for n in ("hold", "fails", "far"))
    flags = {"parallel": "none", "workers": 0, "save-every": 1000, "steps": 12}
    with Example(tmp_path / "straight", 1, flags) as straight:
        assert straight.start("--dumps", "off").wait() == 0, straight.said()
        reference = straight.trace()
    ours = keys.generate()
    keys.write_identity(tmp_path / "identity", ours)
    hold.touch()
    named = {"TRAINCKPT_TIERS": far, "TRAINCKPT_ENCRYPT_TO": ours.recipient, "A_SECRET": secret}
    with Example(tmp_path / "x", 1, flags, HOLD=hold, FAILS=fails, **named) as run:
        run.start()
        first = dumped_at_a_boundary(run, hold, lean=False)
        dumps = Path(run.run) / "dumps"
        for path in (dumps / first["name"] / "images").iterdir():
            assert secret.encode() not in path.read_bytes(), path.name
        assert run.records()[1].outcome["tiers"] == ["local"]
        assert not (far / "dumps").exists()
        assert run.resume().wait() == 78
        assert "is encrypted to" in run.said()
        assert sorted(run.records()) == [1], "nothing is lost by that"

        run.environment["TRAINCKPT_IDENTITY"] = str(tmp_path / "identity")
        restored = [first]
        if again:
            run.resume()
            restored.append(dumped_at_a_boundary(run, hold, lean=False))
            assert f"restored {first['name']}" in run.said()
        assert all(record["keys"] for record in restored)
        fails.touch()
        run.resume("--max-restarts", "1")
        third = dumped_at_a_boundary(run, hold, lean=False)
        assert f"restored {restored[-1]['name']}" in run.said()
        assert "started again, not from the dump: that is used up" in run.said()
        hold.unlink()

        shutil.copytree(dumps / third["name"], far / "dumps" / third["name"])
        lost = max(
            (dumps / third["name"] / "images").iterdir(), key=lambda path: path.stat().st_size
        )
        lost.unlink()
        assert run.resume().wait() == 0, run.said()
        assert f"no dump is restored: {third['name']} is not restored: " in run.said()
        assert lost.name in run.said()
        assert run.trace() == reference
    records = run.records()
    how = [records[number].outcome["outcome"] for number in sorted(records)]
    assert how == ["stopped"] * len(restored) + ["failed", "stopped", "finished"]
    parents = [records[number].parent for number in sorted(records)]
    assert parents[1 : 1 + len(restored)] == [record["name"] for record in restored]
