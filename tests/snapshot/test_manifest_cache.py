"""Manifests that were parsed before are known by their bytes, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.snapshot.written import committed, referring
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST
from trainckpt.snapshot.catalog import MAX_KNOWN, ManifestCache, read_catalog
from trainckpt.storage.local import LocalTier


@pytest.fixture
def tier(tmp_path):
    return LocalTier(tmp_path)


@pytest.fixture
def loads(monkeypatch):
    """What was really parsed."""
    found, load = [], manifests.load
    monkeypatch.setattr(
        manifests,
        "load",
        lambda data, what, **more: found.append(what) or load(data, what, **more),
    )
    return found


def test_the_catalog_is_the_same_but_for_the_tensors_and_nothing_is_parsed_twice(tier, loads):
    first = committed(tier, "s1~1.1", tags=("mine",))
    referring(tier, "s2~1.2", {"model/weight": first})
    parsed, plain = ManifestCache(), read_catalog(tier, "run", {})
    loads.clear()
    for _ in range(3):
        found = read_catalog(tier, "run", {}, parsed)
        assert found == tuple(replace(c, manifest=replace(c.manifest, tensors={})) for c in plain)
    assert len(loads) == 2


def test_a_manifest_that_is_not_what_it_was_is_refused(tier):
    manifest = committed(tier, "s1~1.1")
    parsed = ManifestCache()
    assert [c.usable for c in read_catalog(tier, "run", {}, parsed)] == [True]
    path = tier.root / manifest.name.folder / MANIFEST
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert [c.usable for c in read_catalog(tier, "run", {}, parsed)] == [False]


def test_a_manifest_that_was_just_committed_is_not_parsed(tier, loads):
    first, second = (committed(tier, name) for name in ("s1~1.1", "s2~1.2"))
    parsed = ManifestCache()
    parsed.add(first)
    found = read_catalog(tier, "run", {}, parsed)
    assert [c.manifest for c in found] == [replace(m, tensors={}) for m in (second, first)]
    assert len(loads) == 1


def test_the_cache_is_bounded(tier, loads):
    manifest, parsed = committed(tier, "s1~1.1"), ManifestCache()
    for number in range(MAX_KNOWN + 1):
        parsed.add(replace(manifest, created=float(number)))
    parsed(manifests.dump(replace(manifest, created=1.0)), "x")
    assert not loads
    parsed(manifests.dump(replace(manifest, created=0.0)), "x")
    assert loads == ["x"]
