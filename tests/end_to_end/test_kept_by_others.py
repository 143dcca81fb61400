"""What other hosts keep of a run: whichever copy is damaged or lost, the next one is used."""

from __future__ import annotations

import pytest

from tests.end_to_end import kept_by_others
from tests.end_to_end.kept_by_others import COPY, HOST, OWN, PARITY, PLACE
from tests.ranks.processes import preload, run_ranks
from trainckpt.encryption import keys

preload("tests.end_to_end.kept_by_others")
RANKS = 3
BROUGHT = "rescued s3~1.3 from memory to"
COMPUTED = "1 of its 3 files rebuilt from the others"
AGAIN = "s3~1.3 is replicated again: 1 of its 3 ranks had lost copies"
NOT_WHOLE = "in memory is no longer complete: the files of rank 1 are lost"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All chains of attempts, encrypted and not, by three ranks that are a host each."""
    folder = tmp_path_factory.mktemp("hosts")
    identity = keys.generate()
    keys.write_identity(folder / "id", identity)
    sealed = {"encrypt_to": identity.recipient, "identity": str(folder / "id")}
    partner = [
        (3, {1: [(OWN, 1)]}),  # step 3 is in memory alone; rank 2 has the copy
        (5, {1: [(OWN, 1)], 2: [(COPY, 1)]}),
        (4, {}),
    ]
    parity = [
        (3, {1: [(OWN, 1)]}),
        (5, {1: [(OWN, 1)], 0: [(PARITY, 1)]}),
        (4, {}),
    ]
    lost = [(3, {1: [(HOST, 1)]}), (3, {})]
    twice = [(3, {1: [(HOST, 1)]}), (3, {0: [(PLACE, 0), (HOST, 0)]}), (4, {})]
    chains = {
        "partner": ({"redundancy": "partner"}, partner),
        "xor": ({"redundancy": "xor:3"}, parity),
        "sealed-partner": ({"redundancy": "partner", **sealed}, partner),
        "sealed-xor-beside": ({"redundancy": "xor:3", **sealed}, parity),
        "sealed-lost": ({"redundancy": "xor:3", **sealed}, lost),
        "partner-twice": ({"redundancy": "partner"}, twice),
        "xor-twice": ({"redundancy": "xor:3"}, twice),
        "sealed-partner-twice": ({"redundancy": "partner", **sealed}, twice),
    }
    return run_ranks(kept_by_others.play, RANKS, str(folder), chains)


def states(found, name):
    """Of each attempt: of each rank, where it began and the state it had then, and before."""
    for rank in found:
        known = {}
        for attempt in rank[name]:
            began = attempt["began"]
            if began:
                yield attempt["states"][began] == known[began]
            known.update(attempt["states"])


@pytest.mark.parametrize("name", ["partner", "xor", "sealed-partner", "sealed-xor-beside"])
def test_one_flipped_bit_is_found_and_the_next_copy_is_used_to_the_bit(found, name):
    first, second, third = found[0][name]
    assert [first["began"], second["began"], third["began"]] == [0, 3, 4]
    (line,) = [line for line in second["log"] if BROUGHT in line]
    assert "s3~1.3" in line
    assert (COMPUTED in line) == ("xor" in name)
    assert all(states(found, name))


@pytest.mark.parametrize("name", ["partner", "xor", "sealed-partner", "sealed-xor-beside"])
def test_if_all_copies_are_damaged_the_previous_snapshot_is_used_and_it_is_said_why(found, name):
    third = found[0][name][2]
    assert any(line.startswith("s5~2.2 ") and NOT_WHOLE in line for line in third["log"])
    assert not any(BROUGHT in line for line in third["log"])


@pytest.mark.parametrize("name", ["partner", "xor", "sealed-partner", "sealed-xor-beside"])
def test_verify_names_each_damaged_copy_that_a_host_holds(found, name):
    end = ".safetensors.sealed" if "sealed" in name else ".safetensors"
    own, parity = [f"rank0000{rank}{end}" for rank in range(3)], "set00000.000.parity"
    for rank, damaged in ((0, parity), (1, own[1]), (2, own[1])):
        checked = found[rank][name][1]["verified"]
        kept = {parity.replace(".000.", f".00{rank}.")} if "xor" in name else {own[rank - 1]}
        assert checked.keys() == {own[rank], *kept}
        assert {file for file, ok in checked.items() if not ok} == {damaged} & checked.keys()


def test_what_a_lost_host_had_is_computed_from_what_is_encrypted_without_a_key(found):
    _, second = found[0]["sealed-lost"]
    assert second["began"] == 3
    assert any(BROUGHT in line and COMPUTED in line for line in second["log"])
    assert all(states(found, "sealed-lost"))


def test_what_hosts_keep_for_each_other_is_encrypted_where_the_run_is(found):
    for rank in found:
        for name, attempts in rank.items():
            names = {file for attempt in attempts for file in attempt["readable"]}
            if name == "partner":
                assert len(names) == 1, "else this test would see nothing"
            if "sealed" in name:
                assert not names


@pytest.mark.parametrize("name", ["partner-twice", "xor-twice", "sealed-partner-twice"])
def test_a_second_host_may_be_lost_before_the_attempt_after_the_first_loss_has_saved(found, name):
    first, second, third = found[0][name]
    assert [first["began"], second["began"], third["began"]] == [0, 3, 3]
    assert [line for line in second["log"] if AGAIN in line]
    (line,) = [line for line in third["log"] if BROUGHT in line]
    assert "s3~1.3" in line
    assert all(states(found, name))
