"""Who keeps what of whom: for any hosts, and always the same."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from trainckpt.snapshot.redundancy import (
    RedundancyPlan,
    RedundancySpec,
    make_plan,
    parse_redundancy,
)

places = some.lists(some.sampled_from("abcdefghij"), min_size=1, max_size=24)
codes = some.tuples(some.integers(1, 9), some.integers(1, 3)).map(lambda c: f"rs:{c[0]}+{c[1]}")


def survives(plan, domains, lost):
    """Whether every file can be had again after these domains are gone."""
    left = {rank for rank, domain in enumerate(domains) if domain not in lost}
    if plan.partners:
        return all(rank in left or plan.partners[rank] in left for rank in range(len(domains)))
    return all(len(set(s.members) - left) <= s.num_parity for s in plan.sets)


@given(places)
def test_a_partner_is_in_another_domain_and_holds_no_more_than_its_share(domains):
    plan = make_plan(parse_redundancy("partner"), domains)
    if len(set(domains)) == 1:
        assert not plan.partners
        assert "no copies are made" in plan.warnings[0]
        return
    assert all(domains[rank] != domains[other] for rank, other in enumerate(plan.partners))
    most = max(Counter(domains).values())
    load = max(Counter(plan.partners).values())
    assert load == 1 or load == -(-most // (len(domains) - most))
    assert all(survives(plan, domains, {domain}) for domain in set(domains))
    owners = [owner for rank in range(len(domains)) for owner in plan.kept_by(rank)]
    assert sorted(owners) == list(range(len(domains)))


@given(codes, places)
def test_sets_have_one_member_of_a_domain_and_hold_out_against_what_they_promise(code, domains):
    spec = parse_redundancy(code)
    plan = make_plan(spec, domains)
    if len(set(domains)) == 1:
        assert (plan.sets, plan.num_losses) == ((), 0)
        return
    for each in plan.sets:
        of = [domains[rank] for rank in each.members]
        assert len(set(of)) == len(of)
        assert each.num_parity == plan.num_losses < len(of) <= max(spec.num_members, 2)
    own = sorted(rank for each in plan.sets for rank in each.members[: each.num_own])
    assert own == list(range(len(domains)))
    assert plan.num_losses == min(spec.num_parity, len(set(domains)) - 1)
    assert bool(plan.warnings) == (plan.num_losses < spec.num_parity)
    for lost in combinations(sorted(set(domains)), plan.num_losses):
        assert survives(plan, domains, lost)


@given(some.sampled_from(["partner", "xor:4", "rs:2+2"]), places)
def test_the_same_hosts_give_the_same_plan(spec, domains):
    assert make_plan(parse_redundancy(spec), domains) == make_plan(
        parse_redundancy(spec), list(domains)
    )


def test_hosts_alike_are_divided_into_sets_alike():
    domains = [host for host in "abcdefgh" for _ in range(2)]
    plan = make_plan(parse_redundancy("xor:4"), domains)
    assert [(len(s.members), s.num_own) for s in plan.sets] == [(4, 4)] * 4
    assert make_plan(parse_redundancy("partner"), list("abcd")).partners == (1, 2, 3, 0)


def test_each_member_has_one_element_of_every_stripe_and_as_many_parities_as_any():
    (one,) = make_plan(parse_redundancy("rs:3+2"), "abcde").sets
    for stripe in range(5):
        assert sorted(one.element(place, stripe) for place in range(5)) == [0, 1, 2, 3, 4]
    for place in range(5):
        assert sorted(one.element(place, stripe) for stripe in range(5)) == [0, 1, 2, 3, 4]
    assert (one.num_chunks, one.chunk_bytes(10), one.chunk_bytes(9)) == (3, 4, 3)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", RedundancySpec()),
        ("partner", RedundancySpec("partner", 0, 1, "partner")),
        ("xor:8", RedundancySpec("parity", 8, 1, "xor:8")),
        ("rs:8+2", RedundancySpec("parity", 10, 2, "rs:8+2")),
    ],
)
def test_the_option_says_what_it_means(text, spec):
    assert parse_redundancy(text) == spec
    assert make_plan(RedundancySpec(), "ab") == RedundancyPlan()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "xor",
        "xor:1",
        "xor:0",
        "rs:8",
        "rs:0+2",
        "rs:8+0",
        "rs:254+2",
        "rs:8+4",
        "xor:256",
        "RS:8+2",
        "partners",
    ],
)
def test_what_is_no_code_is_refused(text):
    with pytest.raises(ValueError):
        parse_redundancy(text)
