"""Dumps whose images are encrypted, and their copies in slower tiers."""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.process_dump.example import Example, dumped_at_a_boundary
from tests.process_dump.test_refusals import NAME, Counting
from tests.process_dump.test_restore import RECORD
from tests.s3_servers import BUCKET
from trainckpt.cli.main import main
from trainckpt.encryption import keys
from trainckpt.errors import ConfigurationError, SaveFailed, TierUnavailable, UnusableSnapshot
from trainckpt.format.attempt import AttemptRecord
from trainckpt.format.digest import digest
from trainckpt.format.dump import DumpRecord, Image
from trainckpt.lifecycle.dumping import dump_copies
from trainckpt.lifecycle.dumping.old_dumps import old_dumps, remove
from trainckpt.process_dump import host_word, restore, sealed_images
from trainckpt.snapshot import attempts, flush
from trainckpt.supervisor import left_dump
from trainckpt.supervisor.flush_left import left_by
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.object_store import open_object_store

FILES = {"core-1.img": b"", "pages-1.img": os.urandom((2 << 20) + 5), "files.img": b"secret" * 9}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """This host's key lies in the test's own folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def stored(images, **more):
    found = [(path.name, path.read_bytes()) for path in sorted(images.iterdir())]
    return replace(RECORD, images=tuple(Image(n, len(d), digest(d)) for n, d in found), **more)


# ---- encrypted images


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def test_images_are_encrypted_where_they_lie_and_opened_by_whoever_has_a_key(images):
    ours, other = keys.generate(), keys.generate()
    wrapped = sealed_images.seal(images, RECORD.run, RECORD.name, [ours.recipient])
    record = stored(images, keys=wrapped)
    assert DumpRecord.load(record.dump(), "x") == record
    assert b"secret" not in (images / "files.img").read_bytes()
    key = sealed_images.key_of(record, [ours])
    with sealed_images.opened(images, record, key) as plain:
        assert {path.name: path.read_bytes() for path in plain.iterdir()} == FILES
        assert {path.stat().st_mode & 0o777 for path in (plain, *plain.iterdir())} == {0o700, 0o600}
    assert not plain.exists()
    with pytest.raises(ConfigurationError, match="and no identity is given"):
        sealed_images.key_of(record, [])
    with pytest.raises(ConfigurationError, match="the identity given is of"):
        sealed_images.key_of(record, [other])
    moved = replace(record, run="another")
    with pytest.raises(UnusableSnapshot, match="was changed, or is another's"):
        sealed_images.key_of(moved, [ours])

    def refused(change, why):
        before = (images / "pages-1.img").read_bytes()
        (images / "pages-1.img").write_bytes(change(before))
        with pytest.raises(UnusableSnapshot, match=why), sealed_images.opened(images, record, key):
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
        counting.restore(record, key=sealed_images.key_of(record, [ours]))
        assert counting.counts_on()
        assert not (folder / sealed_images.OPENED).exists()
    finally:
        counting.end()


# ---- copies


@pytest.fixture
def place(tmp_path, images):
    """A run's place with a dump."""
    tier = LocalTier(tmp_path / "run")
    shutil.copytree(images, tier.root / RECORD.name.folder / "images")
    record = stored(images)
    tier.replace(record.name.record, record.dump())
    return tier


def test_a_copy_comes_back_as_it_was_if_this_host_made_it(place, tmp_path, images, state):
    far, name = LocalTier(tmp_path / "far"), RECORD.name
    sent = dump_copies.send(place, far, RECORD.run, name)
    assert sent == sum(map(len, FILES.values()))
    assert dump_copies.send(place, far, RECORD.run, name) == 0
    assert host_word.key_file().stat().st_mode & 0o777 == 0o600

    (far.root / name.image("files.img")).write_bytes(b"Secret" * 9)
    assert dump_copies.send(place, far, RECORD.run, name) == 54, "a bad copy is made good"
    shutil.rmtree(place.root)
    new = LocalTier(tmp_path / "new")
    assert dump_copies.bring(new, [far], RECORD.run, name) == sent
    assert {p.name: p.read_bytes() for p in (new.root / name.folder / "images").iterdir()} == FILES
    assert restore.load(new, RECORD.run, name) == stored(images)
    (new.root / name.image("files.img")).unlink()
    assert dump_copies.bring(new, [far], RECORD.run, name) == 54, "only what is missing"

    def refused(why):
        nowhere = LocalTier(tmp_path / "nowhere")
        with pytest.raises(UnusableSnapshot, match=why):
            dump_copies.bring(nowhere, [far], RECORD.run, name)
        assert restore.names_in(nowhere) == []

    os.truncate(far.root / name.image("pages-1.img"), 7)
    refused("ends .* too early|does not match|has 7 bytes")
    record = far.read(name.record, max_bytes=10**6)
    far.replace(name.record, replace(restore.load(far, RECORD.run, name), root=7).dump())
    refused("is not proven to be from this host and user")
    far.replace(name.record, record)
    (state / "trainckpt" / "dump-key").write_bytes(bytes(32))
    refused("is not proven to be from this host and user")
    far.remove(name.word)
    refused("is not proven to be from this host and user")
    (state / "trainckpt" / "dump-key").chmod(0o644)
    with pytest.raises(TierUnavailable, match="may be read by others"):
        host_word.give(b"")


def test_a_user_without_a_home_is_told_that_there_is_no_place_for_the_key(monkeypatch):
    """As a container may have it: no HOME, and a number that no name belongs to."""

    def unknown(number):
        raise KeyError(number)

    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for ask in (host_word.give, lambda record: host_word.is_ours(record, b"")):
        with pytest.raises(TierUnavailable, match="the key of this host cannot be used: ") as found:
            ask(b"")
        assert "XDG_STATE_HOME" in found.value.hint


def test_what_is_not_encrypted_does_not_leave_the_host(
    place, images, tmp_path, monkeypatch, rclone_server, at
):
    at(rclone_server)
    store, name = open_object_store(f"s3://{BUCKET}/{tmp_path.name}"), RECORD.name
    with pytest.raises(ConfigurationError, match="is not on this host, and images hold every"):
        dump_copies.send(place, store, RECORD.run, name)
    assert store.list("dumps") == []
    monkeypatch.setattr(dump_copies, "file_system", lambda _: "lustre")
    assert "(lustre) is not on this host" in dump_copies.why_not_sent(stored(images), place)

    wrapped = sealed_images.seal(
        place.root / name.folder / "images", RECORD.run, name, [keys.generate().recipient]
    )
    sealed = stored(place.root / name.folder / "images", keys=wrapped)
    place.replace(name.record, sealed.dump())
    sent = dump_copies.send(place, store, RECORD.run, name)
    assert sent == sealed.num_bytes
    assert restore.load(store, RECORD.run, name) == sealed
    assert dump_copies.bring(LocalTier(tmp_path / "new"), [store], RECORD.run, name) == sent
    place.replace(name.record, stored(images).dump())
    with pytest.raises(ConfigurationError):
        dump_copies.send(place, store, RECORD.run, name)
    place.replace(name.record, replace(sealed, reason="another").dump())
    with pytest.raises(SaveFailed, match="another dump is called"):
        dump_copies.send(place, store, RECORD.run, name)


def test_what_a_dumped_attempt_has_left_is_the_dump_and_a_used_copy_goes_whole(place, tmp_path):
    facts = {"tiers": [{"name": "far", "url": "/far"}]}
    outcome = {"outcome": "stopped", "snapshot": "dump~2.7", "kind": "dump", "tiers": ["local"]}
    record = AttemptRecord(2, None, outcome=outcome, newest_commit="s9~2.6", facts=facts)
    left = left_by(record)
    assert (left.names, left.tiers) == ("s9~2.6 and dump~2.7", ("far",))
    facts["tier_commits"] = {"far": "s9~2.6"}
    assert left_by(record).dump == "dump~2.7"
    there = {**outcome, "tiers": ["local", "far"]}
    assert left_by(record.with_(outcome=there)) is None
    began = AttemptRecord(3, "dump~2.7", outcome={"snapshot": "dump~2.7"}, facts=facts)
    assert left_by(began) is None, "the dump is another attempt's"

    far = LocalTier(tmp_path / "far")
    dump_copies.send(place, far, RECORD.run, RECORD.name)
    records = {2: record, 3: AttemptRecord(3, "dump~2.7")}
    assert old_dumps(place, records) == [], "it is being brought back"
    (old,) = old_dumps(far, records, is_copy=True)
    assert old.num_bytes == sum(map(len, FILES.values()))
    remove(far, old, is_copy=True)
    assert far.list("dumps") == []


# ---- all of it


def test_an_encrypted_dump_is_copied_to_another_tier_and_restored_from_there(
    criu_here, tmp_path, capsys, monkeypatch
):
    """Its images are lost, then all of the run's place; then its copy is cut, and the snapshot is
    used. What was restored fails once, and is launched again."""
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
        local, copy = (Path(p) / "dumps" / first["name"] for p in (run.run, far))
        assert f"{first['name']} is in far: " in run.said()
        for path in (*(copy / "images").iterdir(), *(local / "images").iterdir()):
            assert secret.encode() not in path.read_bytes(), path.name
        assert run.records()[1].outcome["tiers"] == ["local", "far"]
        assert run.resume().wait() == 78
        assert "is encrypted to" in run.said()
        assert sorted(run.records()) == [1], "nothing is lost by that"

        monkeypatch.setenv("TRAINCKPT_TIERS", str(far))
        shutil.rmtree(local / "images")
        for words in (
            ["fetch", f"{run.run}@{first['name']}"],
            ["flush", run.run],
            ["verify", run.run],
        ):
            assert main(words) == 0
        said = capsys.readouterr().out
        assert f"{first['name']} in local: copied, " in said
        assert f"{first['name']} in far: was there, " in said
        assert f"{first['name']} " in said.partition("was there")[2], "verified"

        shutil.rmtree(local / "images")
        assert main(["list", run.run]) == 0
        assert f"{first['name']} " in (said := capsys.readouterr().out)
        assert " far " in said
        run.environment["TRAINCKPT_IDENTITY"] = str(tmp_path / "identity")
        run.resume()
        second = dumped_at_a_boundary(run, hold, lean=False)
        assert "MB of it came from other tiers" in run.said()
        assert f"restored {first['name']}" in run.said()

        assert all(record["keys"] for record in (first, second))
        shutil.rmtree(run.run)
        fails.touch()
        run.resume("--max-restarts", "1")
        third = dumped_at_a_boundary(run, hold, lean=False)
        assert f"restored {second['name']}" in run.said()
        assert "started again, not from the dump: that is used up" in run.said()
        hold.unlink()

        shutil.rmtree(Path(run.run) / "dumps")
        largest = max((far / "dumps" / third["name"] / "images").iterdir(), key=_size)
        os.truncate(largest, _size(largest) // 2)
        assert main(["verify", f"{run.run}@{third['name']}"]) == 65
        assert largest.name in capsys.readouterr().out
        assert run.resume().wait() == 0, run.said()
        assert "no dump is restored: " in run.said()
        assert largest.name in run.said()
        assert run.trace() == reference
    records = run.records()
    how = [records[number].outcome["outcome"] for number in sorted(records)]
    assert how == ["stopped", "stopped", "failed", "stopped", "finished"]
    parents = [records[number].parent for number in sorted(records)]
    assert parents[1:3] == [first["name"], second["name"]]
    assert not list(far.glob(f"dumps/{first['name']}")), "used up"


def _size(path):
    return path.stat().st_size


def test_every_tier_that_holds_a_dump_hears_who_goes_on_from_it(tmp_path, monkeypatch):
    """Once the run's place is lost, nothing else says there that it was restored."""
    place, far, other = (LocalTier(tmp_path / name) for name in ("run", "far", "other"))
    run = attempts.found_run(place)
    for tier in (far, other):
        flush.found_there(place, tier, run)
    far.create(RECORD.name.record, RECORD.dump())
    monkeypatch.setenv("TRAINCKPT_TIERS", f"{far.root},{other.root},{tmp_path / 'file' / 'none'}")
    (tmp_path / "file").touch()
    attempts.claim(place, lambda number: AttemptRecord(number, str(RECORD.name)))
    said = []

    left_dump.tell_who_goes_on(place, RECORD.name, said.append)

    assert attempts.read_attempts(far)[1].parent == str(RECORD.name)
    assert attempts.read_attempts(other) == {}
    assert len(said) == 1
    assert f"does not hear who goes on from {RECORD.name}" in said[0]
