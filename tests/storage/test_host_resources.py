"""What may be planned with is the least that host and cgroups have, ours and those around it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainckpt.storage import host_resources

GB = 1 << 30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory")
V2 = ("memory.max", "memory.current", "inactive_file", "")
OWN = {V1: "4:memory:/slurm/job\n9:name=systemd:/\n0::/\n", V2: "0::/slurm/job\n"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes the files of a machine with 40 GB to spare and a cgroup in a cgroup."""
    monkeypatch.setattr(host_resources, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_resources, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_resources, "_host_bytes", lambda: 64 * GB)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {40 << 20} kB\n")

    def make(version, groups):
        limit, taken, cache, root = version
        (tmp_path / "proc/self/cgroup").write_text(OWN[version])
        for path, (most, now, cached) in groups.items():
            folder = tmp_path / "cgroup" / root / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / limit).write_text(f"{most}\n")
            (folder / taken).write_text(f"{now}\n")
            (folder / "memory.stat").write_text(f"cache 9\n{cache} {cached}\nshmem 5\n")

    return make


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_the_tightest_of_the_cgroups_around_us_counts(machine, version):
    machine(version, {"slurm/job": (8 * GB, 5 * GB, GB), "slurm": (6 * GB, 5 * GB, 2 * GB)})
    assert host_resources.limit_bytes() == 6 * GB
    assert host_resources.available_bytes() == 3 * GB - host_resources.SPARE_BYTES
    assert host_resources.budget_bytes(0.5, None) == 3 * GB


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_container_sees_its_own_cgroup_as_the_outermost(machine, version):
    machine(version, {"": (2 * GB, GB, 0)})
    assert host_resources.limit_bytes() == 2 * GB
    assert host_resources.available_bytes() == GB - host_resources.SPARE_BYTES


def test_without_a_limit_it_is_the_host(machine):
    machine(V2, {"slurm/job": ("max", 50 * GB, 0)})
    assert host_resources.limit_bytes() == 64 * GB
    assert host_resources.available_bytes() == 40 * GB - host_resources.SPARE_BYTES


def test_of_another_process_it_is_its_own_cgroup_that_counts(machine, tmp_path):
    machine(V2, {"slurm/job": (2 * GB, GB, 0), "user": (9 * GB, 4 * GB, 2 * GB)})
    (tmp_path / "proc/7").mkdir()
    (tmp_path / "proc/7/cgroup").write_text("0::/user\n")
    assert host_resources.free_bytes() == GB
    assert host_resources.free_bytes(7) == 7 * GB
    assert host_resources.free_bytes(8) == 40 * GB, "it is gone: what the host has"


def test_more_taken_than_allowed_leaves_nothing(machine):
    machine(V1, {"slurm/job": (GB, 2 * GB, 0)})
    assert host_resources.available_bytes() == 0


def test_where_nothing_can_be_read_nobody_knows(machine, tmp_path):
    (tmp_path / "proc/meminfo").unlink()
    assert host_resources.available_bytes() is None
    assert host_resources.transient_bytes() == 0
    assert host_resources.limit_bytes() == 64 * GB


def test_what_the_ranks_will_take_for_the_training_is_left_to_them(machine):
    """Two ranks that hold half a GB each: a file that would fit into what is left does not."""
    machine(V2, {"slurm/job": (2 * GB, 0, 0)})
    place = SimpleNamespace(num_bytes=0, free_bytes=24 * GB)
    assert host_resources.has_room(place, GB // 2)
    assert not host_resources.has_room(
        place, GB // 2, host_resources.training_bytes(GB, new_processes=2)
    )
    assert host_resources.has_room(
        place, GB // 16, host_resources.training_bytes(GB // 8, new_processes=2)
    )


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 3), (16, 2, 4)]
)
def test_whoever_copies_beside_training_leaves_it_a_core(monkeypatch, cores, ranks, threads):
    """With two cores one thread copies: a second would take turns with the one that trains."""
    monkeypatch.setattr(host_resources, "num_cores", lambda: cores)
    assert host_resources.copy_threads(ranks, beside_training=True) == threads
