"""A LoRA-style run writes its frozen base once; pruning, kills and resumes lose nothing of it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import trainckpt
from tests.end_to_end import lora
from tests.end_to_end.training import catalog
from tests.faults.test_bad_bytes import flip
from tests.ranks.processes import context, preload, run_ranks
from trainckpt.cli.main import main
from trainckpt.snapshot import writer_client
from trainckpt.snapshot.verify import verify
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE

preload("tests.end_to_end.lora")


def manifests(place):
    """Of all usable snapshots, the oldest first."""
    return [c.manifest for c in reversed(catalog(place)) if c.usable]


@pytest.mark.parametrize("by", ["the rank", "another process"])
def test_with_1_percent_trained_a_save_writes_at_most_2_percent_also_after_a_resume(
    tmp_path, monkeypatch, by
):
    model = lora.parts()["model"]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained > 0.01 * sum(p.numel() for p in model.parameters())
    if by == "another process":
        monkeypatch.setattr(writer_client, "FROM_BYTES", 0)
    straight = lora.train(0, tmp_path / "straight", 1, 6, every="never")
    first = lora.train(0, tmp_path / "run", 1, 3)
    then = lora.train(0, tmp_path / "run", 1, 6)
    assert {**first, **then} == straight
    found = manifests(tmp_path / "run")
    full = found[0].num_bytes
    assert len(found) == 6
    assert {m.name.attempt for m in found} == {1, 2}
    for manifest in found[1:]:
        assert manifest.num_bytes <= 0.02 * full, manifest.name
        assert [file.name for file in manifest.reached] == [
            f"{found[0].name}/rank00000.safetensors"
        ]
        assert all(copy.ok for copy in verify(LocalTier(tmp_path / "run"), manifest))


def test_two_ranks_write_as_little_and_a_save_inside_a_window_moves_no_cut(tmp_path):
    for straight, stopped in run_ranks(lora.all_ways, 2, tmp_path, 2):
        assert stopped == straight
    found = manifests(tmp_path / "run")
    whole = [m for m in found if not m.reached]
    assert [m.name.sequence for m in whole] == [1]
    inside = [m for m in found[1:] if m.cursor.micro]
    assert inside
    for manifest in found[1:]:
        most = 0.03 if manifest.cursor.micro else 0.02  # there are gradients inside
        assert manifest.num_bytes <= most * whole[0].num_bytes, manifest.name
        assert len(manifest.reached) == 2
        sizes = [file.num_bytes for file in manifest.files]
        assert abs(sizes[0] - sizes[1]) < 0.1 * sum(sizes)


def pruned(place, capsys):
    assert main(["prune", "--json", "--keep-last", "1", str(place)]) == 0
    return json.loads(capsys.readouterr().out)


def test_pruning_the_older_snapshot_loses_nothing(tmp_path, capsys):
    straight = lora.train(0, tmp_path / "straight", 1, 4, every="never")
    first = lora.train(0, tmp_path / "run", 1, 3)
    before = trainckpt.load(tmp_path / "run")
    said = pruned(tmp_path / "run", capsys)
    assert len(said["pruned"]) == 2
    full = manifests(tmp_path / "straight")[-1].num_bytes
    assert said["bytes"] < 0.1 * full  # the frozen base is still needed
    assert main(["list", "--json", str(tmp_path / "run")]) == 0
    (left,) = json.loads(capsys.readouterr().out)["candidates"]
    assert left["usable"]
    assert left["bytes"] <= 0.02 * full < full <= left["total_bytes"]
    assert main(["verify", "--json", str(tmp_path / "run")]) == 0
    copies = json.loads(capsys.readouterr().out)["copies"]
    assert [copy["file"].partition("~")[0] for copy in copies] == ["rank00000.safetensors", "s1"]
    assert main(["diff", "--json", f"{tmp_path}/run@s3", f"{tmp_path}/run"]) == 0
    assert main(["show", "--json", str(tmp_path / "run")]) == 0
    shown = json.loads(capsys.readouterr().out.partition("}\n{")[2].join(["{", ""]))
    assert shown["unread"] == []
    out = tmp_path / "out.safetensors"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    after = trainckpt.load(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {**first, **lora.train(0, tmp_path / "run", 1, 4)} == straight


def test_killed_between_any_two_removals_of_a_prune_the_next_attempt_goes_on_exactly(tmp_path):
    """Snapshot 1 goes at save 2, but for its file, to which all refer; 2 goes whole at save 3."""
    straight = lora.train(0, tmp_path / "straight", 1, 4, every="never")
    left = []
    for at in (1, 3, 4):
        place = tmp_path / str(at)
        process = context.Process(target=lora.killed, args=(0, place, 1, 4, at))
        process.start()
        process.join()
        assert process.exitcode == -9
        newest = manifests(place)[-1]
        assert all(copy.ok for copy in verify(LocalTier(place), newest))
        left.append(sorted(path.name for path in (place / "snapshots").iterdir()))
        then = lora.train(0, place, 1, 4, keep_last=1)
        assert then.items() <= straight.items()
        assert "3.1" in then
        folders = {path.name for path in (place / "snapshots").iterdir()}
        (last,) = manifests(place)
        assert folders == {"s1~1.1", str(last.name)}
    assert [len(folders) for folders in left] == [2, 3, 3]


def unfreeze(step, model):
    """From step 2 on a part of the base changes."""
    if step >= 2:
        with torch.no_grad():
            model[0].frozen.weight += 1


def test_a_frozen_tensor_that_changes_is_written_whatever_it_is_called(tmp_path):
    """By `.data`, by a hook, by a thread: only its bytes say what is unchanged."""
    straight = lora.train(0, tmp_path / "straight", 1, 4, unfreeze, every="never")
    first = lora.train(0, tmp_path / "run", 1, 3, unfreeze)
    assert {**first, **lora.train(0, tmp_path / "run", 1, 4, unfreeze)} == straight
    sizes = [m.num_bytes for m in manifests(tmp_path / "run")]
    weight = lora.WIDTH**2 * 4
    assert sizes[1] < weight / 4 < weight < sizes[2] < 2 * weight


def test_a_file_that_vanished_makes_one_save_fail_and_the_next_write_all_anew(tmp_path, caplog):
    def vanish(step, model):
        if step == 2:
            for path in (tmp_path / "run" / "snapshots").glob("s1~*/*.safetensors"):
                path.unlink()

    lora.train(0, tmp_path / "run", 1, 2)
    lora.train(0, tmp_path / "run", 1, 4, vanish)  # before its first save
    assert "holds the unchanged tensors, is missing or has changed" in caplog.text
    found = manifests(tmp_path / "run")
    assert [(str(m.name), m.reached) for m in found] == [("s4~2.2", ())]
    assert all(copy.ok for copy in verify(LocalTier(tmp_path / "run"), found[-1]))


@pytest.mark.parametrize("every", ["1 steps", "never"])
def test_the_first_save_after_the_place_was_lost_refers_to_nothing_in_another_tier(
    tmp_path, monkeypatch, caplog, every
):
    """The frozen base was read from there; the only save of a short attempt must not fail."""
    monkeypatch.setenv(ROOT_VARIABLE, NONE)
    straight = lora.train(0, tmp_path / "straight", 1, 4, every="never")
    first = lora.train_in_tiers(0, tmp_path / "run", 1, 3, str(tmp_path / "far"))
    shutil.rmtree(tmp_path / "run")
    far = str(tmp_path / "far")
    then = lora.train(0, tmp_path / "run", 1, 4, tiers=far, every=every)
    assert {**first, **then} == straight
    assert "failed" not in caplog.text
    (found,) = manifests(tmp_path / "run")
    assert (found.cursor.step, found.reached) == (4, ())
    assert all(copy.ok for copy in verify(LocalTier(tmp_path / "run"), found))


def test_a_last_save_looks_whether_what_it_refers_to_is_there(tmp_path):
    """No other follows it."""

    def vanish(step, model):
        if step == 3:
            for path in (tmp_path / "run" / "snapshots").glob("s1~*/*.safetensors"):
                path.unlink()

    lora.train(0, tmp_path / "run", 1, 2)
    lora.train(0, tmp_path / "run", 1, 4, vanish, every="never")
    found = manifests(tmp_path / "run")
    assert [(str(m.name), m.reached) for m in found] == [("s4~2.1", ())]


@pytest.mark.parametrize("at", ["header", "data"])
def test_a_damaged_file_is_named_by_every_snapshot_that_refers_to_it(tmp_path, at):
    lora.train(0, tmp_path / "run", 1, 2)
    (path,) = (tmp_path / "run" / "snapshots").glob("s1~*/*.safetensors")
    frozen = lora.parts()["model"][2].frozen.weight.numpy().tobytes()
    flip(path, 100 if at == "header" else path.read_bytes().index(frozen))
    with pytest.raises(trainckpt.errors.NoUsableSnapshot) as caught:
        lora.train(0, tmp_path / "run", 1, 4)
    assert list(caught.value.refused) == ["s2~1.2", "s1~1.1"]
    assert all("s1~1.1/rank00000.safetensors" in why for why in caught.value.refused.values())
