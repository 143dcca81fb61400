"""Real ranks: what is equal is stored once, what differs by each; one decision for all."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest

from tests.end_to_end import ranks
from tests.end_to_end.training import catalog, usable
from tests.faults.test_bad_bytes import flip
from tests.ranks.processes import preload, run_in_turn, run_ranks
from trainckpt.format.manifest import RANK, SPLIT
from trainckpt.snapshot.restore import read_header
from trainckpt.snapshot.verify import verify
from trainckpt.storage.local import LocalTier

preload("tests.end_to_end.ranks")

BUFFERS = {f"model/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two DDP ranks to step 6, saved at 2 and 4; its losses."""
    place = tmp_path_factory.mktemp("ddp") / "run"
    results = run_ranks(ranks.train, 2, str(place), 2, 6)
    return place, [losses for losses, _ in results]


def where(place, name, rank, tensor):
    """In the file of a rank: the first byte of what it holds of a tensor."""
    (manifest,) = [c.manifest for c in catalog(place) if str(c.name) == name]
    header = read_header(LocalTier(place), manifest.name.folder, manifest.files[rank])
    (first,) = [r.first_byte for r in header.regions if r.tensor.startswith(tensor)]
    return header.header_bytes + first


def regions(place, name):
    """Tensor -> the ranks whose file holds bytes of it; the manifest."""
    (manifest,) = [c.manifest for c in catalog(place) if str(c.name) == name]
    held = {}
    for rank, file in enumerate(manifest.files):
        for region in read_header(LocalTier(place), manifest.name.folder, file).regions:
            held.setdefault(region.tensor, []).append((rank, region.num_bytes))
    return held, manifest


def test_what_ddp_ranks_hold_alike_is_stored_once_and_what_differs_by_each(finished):
    place, _ = finished
    (name,) = usable(place)
    held, manifest = regions(place, name)
    assert all(copy.ok for copy in verify(LocalTier(place), manifest))
    for tensor, placement in ((n, entry.placement) for n, entry in manifest.tensors.items()):
        own = tensor in BUFFERS or tensor.startswith(("rng/", "values", "loader"))
        assert placement == (RANK if own else SPLIT), tensor
    for tensor in ("model/0.weight", "optimizer/model/0.weight/exp_avg"):
        assert sum(size for _, size in held[tensor]) == ranks.WIDTH**2 * 4
    assert [rank for rank, _ in held["model/0.weight"]] == [0, 1]
    moments = [of for tensor, of in held.items() if tensor.startswith("optimizer/model/0.weight/e")]
    assert {rank for of in moments for rank, _ in of} == {0, 1}  # divided by themselves
    sizes = [file.num_bytes for file in manifest.files]
    assert abs(sizes[0] - sizes[1]) < 100_000


def test_two_ranks_resume_bit_for_bit_and_from_one_snapshot(finished, tmp_path):
    _, straight = finished
    first = run_ranks(ranks.train, 2, str(tmp_path / "run"), 2, 3)
    second = run_ranks(ranks.train, 2, str(tmp_path / "run"), 2, 6)
    assert [step for _, step in second] == [3, 3]
    for rank in range(2):
        assert {**first[rank][0], **second[rank][0]} == straight[rank]


SCRIPT_S_RATE, DEFAULT = "learning rate: script", None


@pytest.mark.parametrize("choice", [SCRIPT_S_RATE, DEFAULT], ids=["script", "snapshot"])
def test_ranks_of_one_choice_stay_equal_when_the_script_has_changed(finished, tmp_path, choice):
    shutil.copytree(finished[0], tmp_path / "run")
    results = run_ranks(
        ranks.train_at_another_rate, 2, str(tmp_path / "run"), 2, 8, [choice, choice]
    )
    assert results[0] == results[1]
    assert results[0][0] == (0.02 if choice else 0.01)


def test_ranks_of_different_choices_are_all_refused(finished, tmp_path):
    """One would train at the script's rate and one at the snapshot's, and so come apart."""
    shutil.copytree(finished[0], tmp_path / "run")
    choices = [SCRIPT_S_RATE, DEFAULT]
    results = run_ranks(ranks.train_at_another_rate, 2, str(tmp_path / "run"), 2, 8, choices)
    told = (
        'changed="learning rate: script" on rank 0, "learning rate: snapshot" on rank 1: the '
        "ranks would train with different values"
    )
    assert results == [("ConfigurationError", 78, told)] * 2


@pytest.mark.parametrize("reaches", [["tiers", "host"], ["host", "tiers"]])
def test_ranks_with_different_compile_cache_train_and_copy_nothing(tmp_path, reaches):
    place = tmp_path / "run"
    (warning,), silent = run_ranks(ranks.train_with_compile_cache, 2, str(place), 2, 1, reaches)
    assert f'"{reaches[0]}" on rank 0, "{reaches[1]}" on rank 1: nothing is copied' in warning
    assert silent == []
    assert not (place / "compile-cache").exists()


def test_ranks_of_one_host_bring_each_file_into_its_memory_once_for_all(finished, tmp_path):
    _, straight = finished
    place = str(tmp_path / "run")
    _, again = run_in_turn(2, (ranks.train, place, 2, 3), (ranks.train_fetching, place, 2, 6))
    assert [came for _, _, came in again] == [[0], [1]]
    for (losses, step, _), expected in zip(again, straight, strict=True):
        assert step == 3
        assert losses == {at: loss for at, loss in expected.items() if at in losses}


def test_a_rank_without_memory_waits_for_the_same_as_those_that_have_it(finished, tmp_path):
    _, straight = finished
    place = str(tmp_path / "run")
    _, again = run_in_turn(
        2, (ranks.train, place, 2, 3), (ranks.train_where_one_has_no_memory, place, 2, 6)
    )
    for (losses, step), expected in zip(again, straight, strict=True):
        assert step == 3
        assert losses == {at: loss for at, loss in expected.items() if at in losses}


def test_a_file_that_is_damaged_is_refused_by_all_ranks_alike(finished, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    (name,) = usable(place)
    flip(place / "snapshots" / name / "rank00001.safetensors", where(place, name, 1, "rng/torch"))
    refusals = run_ranks(ranks.refused, 2, str(place), 2, 7)
    assert refusals[0] == refusals[1]
    assert refusals[0][:2] == ("NoUsableSnapshot", 65)
    assert "rank 1: " in refusals[0][2]
    assert "rank 0: " not in refusals[0][2]


def test_parameters_that_differ_between_ranks_are_stored_by_each(tmp_path):
    results = run_ranks(ranks.train_apart, 2, str(tmp_path / "run"), 2, 3)
    assert results[0][0] != results[1][0]
    name = usable(tmp_path / "run")[-1]
    held, manifest = regions(tmp_path / "run", name)
    assert manifest.tensors["model/0.weight"].placement == RANK
    assert [size for _, size in held["model/0.weight"]] == [ranks.WIDTH**2 * 4] * 2


def test_another_number_of_ranks_goes_on_from_the_same_step(finished, tmp_path):
    """DDP on two ranks, on one, on three; nobody is asked for anything."""
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    for world, steps in ((1, 8), (3, 9)):
        before = int(usable(place)[-1][1:].split("~")[0])
        results = run_ranks(ranks.train, world, str(place), world, steps)
        assert [step for _, step in results] == [before] * world
        assert usable(place)[-1].startswith(f"s{steps}~")


def test_a_rank_that_cannot_capture_fails_the_save_for_all_and_not_the_next(tmp_path):
    one, two = run_ranks(ranks.fails_on_one, 2, str(tmp_path / "run"), 2, 9)
    assert one == two
    assert "rank 1: fragile.x is a builtins.object" in one[0]
    assert one[1].startswith("s")


@pytest.mark.parametrize(
    "until", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long), 5]
)
def test_each_rank_goes_on_counting_its_own_samples(tmp_path, until):
    straight, first, second = run_in_turn(
        2,
        (ranks.count_uneven, str(tmp_path / "straight"), 99),
        (ranks.count_uneven, str(tmp_path / "run"), until),
        (ranks.count_uneven, str(tmp_path / "run"), 99),
    )
    assert straight[1] == {number: 2 * number for number in range(8)}
    assert [one | two for one, two in zip(first, second, strict=True)] == straight


def test_what_each_rank_has_of_its_own_under_one_name_is_its_own_again(tmp_path):
    place = str(tmp_path)
    found = run_in_turn(2, (ranks.own_values, place, True), (ranks.own_values, place, False))
    assert found == [[([0, 7], 0), ([1, 7], 1)]] * 2


def test_a_model_resumes_with_compile_inside_ddp_outside_and_without(tmp_path):
    attempts = ((2, "compile ddp"), (4, "ddp compile"), (6, "ddp"), (8, "compile ddp"))
    calls = [(ranks.compiled, str(tmp_path / "run"), until, how) for until, how in attempts]
    straight, *found = run_in_turn(
        2, (ranks.compiled, str(tmp_path / "straight"), 8, "ddp"), *calls
    )
    rest = [list(itertools.chain(*losses)) for losses in zip(*found, strict=True)]
    assert rest == straight


def test_a_state_of_one_rank_that_no_save_can_store_is_refused_by_all(tmp_path):
    one, two = run_ranks(ranks.cannot_be_stored_on_one, 2, str(tmp_path))
    assert one == two
    assert "own.x is a builtins.object" in one


@pytest.mark.parametrize("every", ["1 step", "never"])
def test_what_one_rank_finds_after_a_resume_is_said_and_recorded_by_rank_0(tmp_path, every):
    place = str(tmp_path)
    _, (first, other) = run_in_turn(
        2, (ranks.frozen_on_one, place, 2, every), (ranks.frozen_on_one, place, 5, every)
    )
    (finding,) = [line for line in other if line.startswith("not exact: frozen now")]
    reason = finding.removeprefix("not exact: ")
    assert first.count(f"not exact: rank 1: {reason}") == 1
    words = [line for line in first if line.startswith("this resume is ")]
    assert words == ["this resume is same data, not bitwise: requires_grad on rank 1"]
    outcome = json.loads((tmp_path / "attempts" / "2.json").read_text())["outcome"]
    assert outcome["exactness"] == "same data, not bitwise"
    assert outcome["restored"] == [
        {"name": "requires_grad", "how": "not kept", "reason": reason, "rank": 1}
    ]


@pytest.mark.parametrize("until", [2, pytest.param(6, marks=pytest.mark.long)])
def test_a_batch_sampler_with_leftovers_of_each_rank_goes_on_under_ddp(tmp_path, until):
    """lightning#21312."""
    straight, first, rest = run_in_turn(
        2,
        (ranks.train_grouped, str(tmp_path / "straight"), 2, 99),
        (ranks.train_grouped, str(tmp_path / "run"), 2, until),
        (ranks.train_grouped, str(tmp_path / "run"), 2, 99),
    )
    assert [one + two for one, two in zip(first, rest, strict=True)] == straight
    samples = [{x for _, batch, _ in lines for x in batch} for lines in straight]
    assert not samples[0] & samples[1]
    assert all(two != whole[: len(two)] for two, whole in zip(rest, straight, strict=True))


def test_weights_that_are_tied_under_fsdp_stay_tied(tmp_path):
    """verl#7834."""
    straight, _, resumed, cold = run_in_turn(
        2,
        (ranks.train_tied, str(tmp_path / "straight"), 6, 0),
        (ranks.train_tied, str(tmp_path / "run"), 3, 0),
        (ranks.train_tied, str(tmp_path / "run"), 6, 0),
        (ranks.train_tied, str(tmp_path / "cold"), 6, 3),
    )
    for (whole, _), (rest, tied), (anew, _) in zip(straight, resumed, cold, strict=True):
        assert rest == {step: whole[step] for step in range(3, 6)}
        assert anew != rest
        assert tied


def test_a_quota_that_is_full_at_the_commit_fails_that_save_on_all_ranks(tmp_path):
    """Automodel#3390: a resume finds the newest committed one, twice, and no rank hangs."""
    place = str(tmp_path / "run")
    # At the end a save is due, and the final one is another.
    attempts = [(5, [2, 4, 5, 6], None, 74), (6, [1, 3, 4], 3, 74), (6, [], 5, 0)]
    for until, failing, resumed, code in attempts:
        ended = run_ranks(ranks.full_at_the_commit, 2, place, until, failing)
        assert ended == [(resumed, code)] * 2
    assert [name.split("~")[0] for name in usable(place)] == ["s1", "s3", "s5", "s6"]
