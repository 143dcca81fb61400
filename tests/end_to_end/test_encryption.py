"""A run whose snapshots are encrypted: the trainer writes, and only who has the identity reads."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import trainckpt
from tests.end_to_end import lora
from tests.end_to_end.test_tiers import files
from tests.end_to_end.training import Parts, attempt, catalog, crashed, usable
from tests.ranks.processes import preload, run_ranks
from trainckpt import Checkpointer
from trainckpt.attempt.options import read_options
from trainckpt.cli.main import main
from trainckpt.encryption import keys
from trainckpt.errors import ConfigurationError, NoUsableSnapshot, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format.manifest import to_text
from trainckpt.resume.resume import AT_VARIABLE
from trainckpt.save.encryption import check
from trainckpt.snapshot import writer_client
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE

preload("tests.end_to_end.lora")
FILE, MANIFEST = "rank00000.safetensors", "manifest.json"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    """An identity: its file, and its recipient."""
    path, identity = tmp_path_factory.mktemp("keys") / "id", keys.generate()
    keys.write_identity(path, identity)
    return {"file": str(path), "to": identity.recipient}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums of several round otherwise; a training of one test sets it for all after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, one_thread):
    """The end of the run that never stopped, and was not encrypted."""
    parts, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=3)
    return parts.state()


@pytest.fixture
def only_on_disk(monkeypatch):
    """Else a resume reads what is in memory, where it is not encrypted."""
    monkeypatch.setenv(ROOT_VARIABLE, NONE)


@pytest.fixture
def run(tmp_path, key, only_on_disk):
    """A run with two encrypted snapshots, s2~1.1 and s4~1.2, that crashed then."""
    crashed(tmp_path / "run", 9, epochs=3, inside=settled, encrypt_to=key["to"])
    assert usable(tmp_path / "run") == ["s2~1.1", "s4~1.2"]
    return tmp_path / "run"


def settled(ckpt, _):
    """Else a save is skipped where disks are slow."""
    ckpt._attempt.saver.wait()


def resumed(place, key, **options):
    """What the next attempt goes on from, and why not from a newer one."""
    options = {"encrypt_to": key["to"], "identity": key["file"], **options}
    with Checkpointer(place, **Parts().tracked(), **options) as ckpt:
        assert ckpt.resumed_from is not None, "it silently began at step 0"
        return ckpt.resumed_from.step, dict(ckpt._attempt.beginning.refused or {})


@pytest.mark.parametrize("how", ["from disk", "from memory", "by another process", "streamed"])
def test_an_encrypted_run_goes_on_as_if_it_had_never_stopped(
    tmp_path, key, straight, monkeypatch, how
):
    if how == "by another process":
        monkeypatch.setattr(writer_client, "FROM_BYTES", 0)
    options = {"memory_budget": "1 B"} if how == "streamed" else {}
    options |= {"encrypt_to": [key["to"]], "identity": key["file"], "epochs": 3}
    crashed(tmp_path, 9, inside=settled, **options)
    if how != "from memory":
        monkeypatch.setenv(ROOT_VARIABLE, NONE)
    parts, ckpt = attempt(tmp_path, **options)
    assert ckpt.resumed_from.step == 4
    assert parts.state() == straight


def test_nothing_of_the_tensors_or_the_script_s_values_is_readable(run):
    parts = Parts()
    word = parts.scheduler.__class__.__name__.encode()
    for path in run.glob("snapshots/*/*.safetensors"):
        data = path.read_bytes()
        assert data.count(b"model") == data.count(word) == data.count(b"xxh3") == 0
    told = (run / "snapshots/s4~1.2/manifest.json").read_text()
    assert "model/0.weight" in told  # names and shapes are not secret
    assert json.loads(told)["format"] == 4


def test_two_snapshots_of_one_state_have_no_byte_or_digest_in_common(tmp_path, key, only_on_disk):
    def twice(ckpt, _):
        if ckpt.cursor.micro_batches in (2, 3):
            ckpt.save()

    attempt(tmp_path, inside=twice, epochs=1, encrypt_to=key["to"], exclude="model/*")
    found = [c.manifest for c in catalog(tmp_path)]
    stated = [d for m in found for f in m.files for d in (f.digest, f.header_digest)]
    assert len(set(stated)) == len(stated) >= 4


# ---- keys


def test_without_an_identity_a_resume_is_refused_and_older_snapshots_are_not_tried(run, key):
    before = sorted((run / "snapshots").iterdir())
    with pytest.raises(ConfigurationError, match="no identity is given") as caught:
        resumed(run, key, identity="none")
    assert key["to"] in caught.value.message
    assert "--identity FILE" in caught.value.hint
    assert sorted((run / "snapshots").iterdir()) == before


def test_with_another_s_identity_it_is_said_to_whom_it_is_encrypted(run, key, tmp_path):
    other = keys.generate()
    keys.write_identity(tmp_path / "other", other)
    with pytest.raises(ConfigurationError, match="the identity given is of") as caught:
        resumed(run, key, identity=tmp_path / "other")
    assert key["to"] in caught.value.message
    assert other.recipient in caught.value.message


def test_any_of_several_recipients_can_go_on(tmp_path, key, only_on_disk):
    other = keys.generate()
    keys.write_identity(tmp_path / "other", other)
    crashed(tmp_path / "run", 5, inside=settled, encrypt_to=[other.recipient, key["to"]])
    assert resumed(tmp_path / "run", key)[0] == 2
    assert resumed(tmp_path / "run", {"file": tmp_path / "other", "to": key["to"]})[0] == 2


def test_the_file_of_an_identity_must_be_there_and_be_one(run, key, tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        resumed(run, key, identity=tmp_path / "nowhere")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigurationError, match="holds no identity"):
        resumed(run, key, identity=tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"encrypt_to": "somebody"}, "cannot read somebody"),
        ({"encrypt_to": keys.RECIPIENT + "abc"}, "is no trainckpt-recipient"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, key, options, why):
    options = {"encrypt_to": key["to"], **options}
    with pytest.raises(ConfigurationError, match=why):
        attempt(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_without_the_package_the_error_prints_the_line_that_installs_it(key, monkeypatch):
    monkeypatch.setattr("trainckpt.encryption.keys.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="not installed") as caught:
        check(read_options({"encrypt_to": key["to"]}))
    assert "pip install 'trainckpt[crypto]'" in caught.value.hint


# ---- from and to what is not encrypted


def test_a_run_goes_on_in_the_clear_only_if_somebody_says_so(run, key, caplog):
    with pytest.raises(
        ConfigurationError, match="encrypt_to is not set for this attempt"
    ) as caught:
        resumed(run, key, encrypt_to=None)
    assert f'encrypt_to="{key["to"]}"' in caught.value.hint
    with caplog.at_level(logging.WARNING, "trainckpt"):
        assert resumed(run, key, encrypt_to="none")[0] == 4
    assert "the next snapshots are not" in caplog.text


def test_a_run_that_was_not_encrypted_goes_on_encrypted_and_refers_to_nothing(
    tmp_path, key, only_on_disk
):
    first = lora.train(0, tmp_path / "run", 1, 2)
    how = {"encrypt_to": key["to"], "identity": key["file"]}
    then = lora.train(0, tmp_path / "run", 1, 5, **how)
    last = lora.train(0, tmp_path / "run", 1, 6, **how)
    assert {**first, **then, **last} == lora.train(0, tmp_path / "straight", 1, 6, every="never")
    found = {str(c.name): c.manifest for c in catalog(tmp_path / "run")}
    reached = {name: [f.name for f in m.reached] for name, m in found.items()}
    assert reached["s2~1.2"] == ["s1~1.1/rank00000.safetensors"]
    assert reached["s3~2.1"] == []
    assert reached["s4~2.2"] == reached["s6~3.1"] == ["s3~2.1/rank00000.safetensors"]
    assert set(found["s6~3.1"].encryption.keys) == {"s3~2.1", "s6~3.1"}
    weights = trained(tmp_path / "run@s6~3.1", key)
    assert weights.keys() == trained(tmp_path / "straight", key).keys()


def test_what_is_encrypted_to_others_is_not_referred_to(tmp_path, key, only_on_disk):
    """Else nobody could read what is saved: its own key is for some, what it needs for others."""
    other = keys.generate()
    both = tmp_path / "both"
    keys.write_identity(both, other)
    both.write_text(both.read_text() + Path(key["file"]).read_text())
    first = lora.train(0, tmp_path / "run", 1, 2, encrypt_to=key["to"])
    how = {"encrypt_to": [other.recipient, key["to"]], "identity": both}
    then = lora.train(0, tmp_path / "run", 1, 4, **how)
    last = lora.train(0, tmp_path / "run", 1, 6, **how, keep_last=1)
    assert {**first, **then, **last} == lora.train(0, tmp_path / "straight", 1, 6, every="never")
    newest = catalog(tmp_path / "run")[0].manifest
    assert [file.name for file in newest.reached] == ["s3~2.1/rank00000.safetensors"]
    keys.write_identity(tmp_path / "alone", other)
    alone = trained(tmp_path / "run", {"file": str(tmp_path / "alone")})
    assert alone.keys() == trained(tmp_path / "run", key).keys()


def test_what_is_in_the_clear_and_newer_than_what_is_encrypted_is_used_only_by_name(
    run, key, monkeypatch
):
    """Whoever can write there could have put it."""
    attempt(run, epochs=3, crash_at=None, encrypt_to="none", identity=key["file"])
    newest = usable(run)[-1]
    with pytest.raises(UnusableSnapshot, match="a stranger without the key") as caught:
        resumed(run, key)
    assert f"--at {newest}" in caught.value.hint
    monkeypatch.setenv(AT_VARIABLE, newest)
    assert resumed(run, key)[0] == 7


def trained(target, key):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINCKPT_IDENTITY", key["file"])
        return trainckpt.load(target, only="model/*")


def test_several_ranks_save_and_read_what_is_encrypted(tmp_path, key, only_on_disk):
    how = {"encrypt_to": key["to"], "identity": key["file"]}
    for straight, stopped in run_ranks(lora.all_ways, 2, tmp_path, 2, how):
        assert stopped == straight
    found = [c.manifest for c in catalog(tmp_path / "run")]
    assert all(m.encryption is not None and len(m.files) == 2 for m in found)
    assert any(m.reached for m in found)
    weights = trained(tmp_path / "run@s4", key)
    alone = lora.parts()  # one rank, of what two have written
    data = alone["loader"].dataset
    alone["loader"] = DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0))
    with Checkpointer(tmp_path / "run", every="never", **alone, **how) as ckpt:
        assert ckpt.resumed_from.step == 4
        found = {f"model/{name}": p for name, p in alone["model"].named_parameters()}
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


# ---- what is refused


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def changed(path, change):
    """What an attacker does who can write, but has no key: the seal is no secret."""
    body = json_io.verify_digest(json.loads(path.read_bytes()), "manifest")
    change(body)
    path.write_bytes(json_io.with_digest(body))


def newest(run, name=FILE):
    return run / "snapshots" / "s4~1.2" / name


def older(run, name=FILE):
    return run / "snapshots" / "s2~1.1" / name


def rolled_back(run):
    """The older snapshot's state, under the name of the newer one."""
    told = json.loads(older(run, MANIFEST).read_bytes())
    there = json.loads(newest(run, MANIFEST).read_bytes())
    newest(run).write_bytes(older(run).read_bytes())
    for name in ("cursor", "window", "sequence", "id"):
        told[name] = there[name]
    told["encryption"]["keys"] = {"s4~1.2": told["encryption"]["keys"]["s2~1.1"]}
    told.pop("digest")
    newest(run, MANIFEST).write_bytes(json_io.with_digest(told))


def files_of_the_older(run):
    """The newer manifest, with the older one's file."""
    newest(run).write_bytes(older(run).read_bytes())
    files = json.loads(older(run, MANIFEST).read_bytes())["files"]
    changed(newest(run, MANIFEST), lambda body: body.update(files=files))


def forged_key(run):
    """One that the attacker knows, wrapped for the recipient."""

    def change(body):
        ((to, _),) = body["encryption"]["keys"]["s4~1.2"]
        wrapped = keys.wrap(bytes(32), to, keys.context(body["run"], "s4~1.2"))
        body["encryption"]["keys"]["s4~1.2"] = [[to, to_text(wrapped.key)]]

    changed(newest(run, MANIFEST), change)


def set_(**what):
    return lambda run: changed(newest(run, MANIFEST), lambda body: body.update(what))


def truncated(run):
    data = newest(run).read_bytes()[:-100]
    newest(run).write_bytes(data)
    changed(newest(run, MANIFEST), lambda body: body["files"].update(bytes=[len(data)]))


ATTACKS = {
    "a bit of the ciphertext": lambda run: flip(newest(run), 3000),
    "a bit of its last byte": lambda run: flip(newest(run), -1),
    "another snapshot's file": lambda run: newest(run).write_bytes(older(run).read_bytes()),
    "another snapshot's manifest": lambda run: newest(run, MANIFEST).write_bytes(
        older(run, MANIFEST).read_bytes()
    ),
    "a rolled-back snapshot": rolled_back,
    "the older file, and a manifest that names it": files_of_the_older,
    "a forged key": forged_key,
    "another cursor": lambda run: changed(
        newest(run, MANIFEST), lambda body: body["cursor"].update(samples=1)
    ),
    "other tensors": lambda run: changed(
        newest(run, MANIFEST), lambda body: body["tensors"].pop("model/0.weight")
    ),
    "another parent": set_(parent="s1~1.0"),
    "another fingerprint": set_(fingerprint={}),
    "a tag": set_(tags=["best"]),
    "a file that was cut, and a manifest that says so": truncated,
    "no sealed part": lambda run: changed(
        newest(run, MANIFEST), lambda body: body["encryption"].update(sealed="")
    ),
    "a bit of a wrapped key": lambda run: changed(
        newest(run, MANIFEST),
        lambda body: body["encryption"]["keys"]["s4~1.2"][0].__setitem__(1, "AAAA"),
    ),
    "keys of no snapshot": lambda run: changed(
        newest(run, MANIFEST), lambda body: body["encryption"].update(keys={})
    ),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_whatever_was_changed_is_refused_and_the_next_older_one_is_used(run, key, what):
    ATTACKS[what](run)
    step, refused = resumed(run, key)
    assert (step, list(refused)) == (2, ["s4~1.2"])


def test_if_all_were_changed_it_never_begins_at_step_0(run, key):
    for path in (newest(run), older(run)):
        flip(path, 3000)
    with pytest.raises(NoUsableSnapshot):
        resumed(run, key)


# ---- the command line


def test_verbs_read_it_with_the_identity_and_say_what_is_missing_without(
    run, key, tmp_path, capsys, monkeypatch
):
    def told(*arguments, code=0):
        assert main([*arguments, "--json"]) == code, capsys.readouterr()
        return json.loads(capsys.readouterr().out)

    with_it = ("--identity", key["file"])
    assert [c["usable"] for c in told("list", str(run))["candidates"]] == [True, True]
    assert told("verify", str(run))["ok"]
    assert told("verify", str(run), *with_it)["ok"]
    assert "no identity is given" in told("show", str(run))["unread"][0]
    assert told("show", str(run), *with_it)["unread"] == []
    out = str(tmp_path / "out.safetensors")
    assert told("export", str(run), out, code=78)["hint"].startswith("TRAINCKPT_IDENTITY")
    assert told("export", str(run), out, *with_it)["tensors"]
    assert told("diff", f"{run}@s2", str(run), *with_it, code=1)["tensors"]
    with pytest.raises(ConfigurationError, match="no identity"):
        trainckpt.load(run)
    monkeypatch.setenv("TRAINCKPT_IDENTITY", key["file"])
    assert torch.is_tensor(trainckpt.load(run)["model/0.weight"])


def test_verify_finds_without_a_key_what_was_damaged_and_with_it_what_was_forged(run, key, capsys):
    flip(newest(run), 3000)
    assert main(["verify", str(run), "--json"]) == 65
    capsys.readouterr()
    flip(newest(run), 3000)
    changed(newest(run, MANIFEST), lambda body: body.update(fingerprint={}))
    assert main(["verify", str(run), "--json"]) == 0
    capsys.readouterr()
    assert main(["verify", str(run), "--json", "--identity", key["file"]]) == 65
    (bad,) = [c for c in json.loads(capsys.readouterr().out)["copies"] if not c["ok"]]
    assert bad["file"] == MANIFEST
    assert "was changed" in bad["reason"]


def test_keygen_makes_what_encrypts_and_what_reads(tmp_path, capsys):
    assert main(["keygen", str(tmp_path / "id"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each.recipient for each in keys.read_identities(tmp_path / "id")] == [told["recipient"]]
    assert main(["keygen", str(tmp_path / "id")]) == 78
    assert "is there already" in capsys.readouterr().err


# ---- tiers


def test_an_encrypted_run_lives_in_an_object_store_and_every_verb_works_there(
    tmp_path, key, straight, only_on_disk, rclone_server, at, capsys, caplog
):
    at(rclone_server)
    url, archive = "s3://bucket/encrypted", str(tmp_path / "archive")
    how = {"encrypt_to": key["to"], "identity": key["file"], "epochs": 3}
    crashed(url, 9, inside=settled, **how)

    def told(*arguments, code=0):
        assert main([*arguments, "--json"]) == code, capsys.readouterr()
        return json.loads(capsys.readouterr().out)

    with_it, out = ("--identity", key["file"]), str(tmp_path / "out.safetensors")
    assert [c["usable"] for c in told("list", url)["candidates"]] == [True, True]
    assert "no identity is given" in told("show", url)["unread"][0]
    assert told("show", url, *with_it)["unread"] == []
    assert told("verify", url)["ok"]
    assert told("verify", url, *with_it)["ok"]
    assert told("export", url, out, *with_it)["tensors"]
    assert told("flush", url, "--to", archive)["tiers"][0]["bytes"]
    assert told("verify", archive, *with_it)["ok"]
    damaged = rclone_server.folder / "bucket/encrypted/snapshots/s4~1.2" / FILE
    flip(damaged, 3000)
    assert not told("verify", url, code=65)["ok"]
    assert told("fetch", url, "--from", archive)["tiers"][0]["bytes"]
    assert told("verify", url, *with_it)["ok"]
    flip(damaged, 3000)
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, ckpt = attempt(url, tiers=archive, **how)
    assert "s4~1.2/rank00000.safetensors in local: does not match its digest" in caplog.text
    assert "s4~1.2 was read from archive" in caplog.text
    assert ckpt.resumed_from.step == 4
    assert parts.state() == straight


def test_slower_tiers_hold_what_is_stored_and_a_run_goes_on_from_them_alone(
    run, tmp_path, key, straight
):
    how = {"tiers": [tmp_path / "archive"], "encrypt_to": key["to"], "identity": key["file"]}
    assert main(["flush", str(run), "--to", str(tmp_path / "archive")]) == 0
    assert files(tmp_path / "archive").items() <= files(run).items()
    shutil.rmtree(run)
    parts, ckpt = attempt(run, epochs=3, **how)
    assert ckpt.resumed_from.step == 4
    assert parts.state() == straight
    last = usable(run)[-1]
    stored = {path: data for path, data in files(run).items() if path.startswith(last)}
    assert len(stored) == 2
    assert stored.items() <= files(tmp_path / "archive").items()


def test_flush_and_fetch_need_no_key(run, tmp_path, capsys):
    archive = str(tmp_path / "archive")
    assert main(["flush", str(run), "--to", archive]) == 0
    flip(newest(run), 3000)
    assert main(["fetch", str(run), "--from", archive]) == 0
    assert main(["verify", str(run)]) == 0
    assert "bad" in capsys.readouterr().out


def test_rewrap_changes_who_can_read_in_every_tier_and_writes_no_data(
    run, key, tmp_path, capsys, straight
):
    other, archive = keys.generate(), tmp_path / "archive"
    keys.write_identity(tmp_path / "other", other)
    for snapshot in ("s2", "s4"):
        assert main(["flush", f"{run}@{snapshot}", "--to", str(archive)]) == 0
    with Checkpointer(
        run, **Parts().tracked(), encrypt_to=key["to"], identity=key["file"], tiers=[archive]
    ):
        pass  # the run's records know the tier from now on
    before = files(run)
    assert main(["rewrap", str(run), "--to", str(tmp_path / "other")]) == 78  # an identity
    (tmp_path / "team").write_text(f"{other.recipient}\n")
    assert main(["rewrap", str(run), "--to", str(tmp_path / "team")]) == 78
    assert "no identity is given" in capsys.readouterr().err
    assert files(run) == before
    with_it = ["--identity", key["file"], "--json"]
    assert main(["rewrap", str(run), "--to", str(tmp_path / "team"), *with_it]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["snapshot"]: row["tiers"] for row in told["snapshots"]}["s4~1.2"] == [
        "local",
        "archive",
    ]
    after = files(run)
    assert {path for path in after if after[path] != before[path]} == {
        path for path in before if path.endswith(MANIFEST)
    }
    assert {p: d for p, d in files(archive).items() if d != after[p]} == {}
    assert main(["verify", str(run), *with_it]) == 78
    assert main(["verify", str(run), "--identity", str(tmp_path / "other")]) == 0
    parts, ckpt = attempt(run, epochs=3, encrypt_to=key["to"], identity=tmp_path / "other")
    assert ckpt.resumed_from.step == 4
    assert parts.state() == straight


def test_rewrap_refuses_a_manifest_that_was_changed(run, key, tmp_path, capsys):
    changed(newest(run, MANIFEST), lambda body: body["cursor"].update(samples=1))
    with_it = ["--identity", key["file"], "--json"]
    before = files(run)
    assert main(["rewrap", str(run), "--to", keys.generate().recipient, *with_it]) == 65
    rows = json.loads(capsys.readouterr().out)["snapshots"]
    assert [bool(row["tiers"]) for row in rows] == [False, True]
    assert "was changed" in rows[0]["reason"]
    assert files(run)["s4~1.2/manifest.json"] == before["s4~1.2/manifest.json"]


def test_a_tier_that_was_not_rewrapped_with_the_others_gets_the_new_manifest(
    run, key, tmp_path, capsys
):
    archive = tmp_path / "archive"
    assert main(["flush", str(run), "--to", str(archive)]) == 0
    with_it = ["--identity", key["file"]]
    assert main(["rewrap", str(run), "--to", keys.generate().recipient, *with_it]) == 0
    assert main(["flush", str(run), "--to", str(archive)]) == 0
    assert files(archive)["s4~1.2/manifest.json"] == files(run)["s4~1.2/manifest.json"]
