"""Metrics of real runs, as a collector gets them, and places that do not take them."""

from __future__ import annotations

import gc
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.cli.test_pause import living, plain, wait_for  # noqa: F401 - `plain` is a fixture
from tests.metrics.scraping import (
    Values,
    free_port,
    prom_file,
    scrape,
    sockets,
    step,
    taken_port,
    tracked,
    warnings,
)
from tests.ranks.processes import run_ranks
from trainckpt import Checkpointer
from trainckpt.metrics.metric_table import METRICS
from trainckpt.metrics.prometheus_output import prom_file_name

LABELS = {("attempt", "run"), *(tuple(sorted(m.labels)) for m in METRICS)}


def values(port):
    return Values(scrape(port))


def stop(process):
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75


# ---- http


def test_a_live_run_is_scraped_and_tells_what_its_records_tell(tmp_path):
    run, far, port = tmp_path / "run", tmp_path / "far", free_port()
    how = {"metrics": f"http:127.0.0.1:{port}", "every": "10 steps", "grace": "40 s"}
    with living(run, tiers=str(far), **how) as process:
        wait_for(lambda: (values(port).get("last_durable_step", "far") or 0) >= 20)
        first = values(port)
        stop(process)
    assert first.run == (str(run), "1")
    assert first.labels <= LABELS
    assert first["running"] == 1
    assert first["steps_total"] >= first["last_durable_step", "far"]
    assert first["commit_seconds_count"] >= 2
    assert first["persist_seconds_count"] == first["commit_seconds_count"]
    assert first["save_stall_seconds_count"] >= first["commit_seconds_count"]
    assert first["bytes_total", "local"] >= first["bytes_total", "far"] > 0
    assert first["save_interval_seconds", "far"] == first["save_interval_seconds", "local"]
    assert 0 <= first["last_durable_age_seconds", "far"] < 60
    assert first["replica_lag_steps", "far"] <= first["steps_total"]
    assert first["failed_saves_total", "full"] == first["consecutive_failed_saves"] == 0
    assert first["verify_failures_total", "local"] == 0
    assert first["resumes_total", "stopped"] == 0
    assert first["goodput_seconds_total"] > 0
    assert first["badput_seconds_total", "training_prep"] > 0
    assert 0 < first["grace_left_seconds"] <= 40
    assert scrape(port) == ""
    with living(run, attempt=2, tiers=str(far), **how) as process:
        wait_for(lambda: values(port).get("goodput_seconds_total"))
        again = values(port)
        stop(process)
    assert again.run == (str(run), "2")
    assert again["resumes_total", "stopped"] == 1
    assert again["goodput_seconds_total"] > first["goodput_seconds_total"]
    assert again["badput_seconds_total", "infrastructure_recovery_from_disruption"] > 0
    sources = [again.get("restore_seconds", tier) for tier in ("memory", "local", "far")]
    assert any(seconds for seconds in sources)


def test_the_names_and_kinds_are_those_of_the_table(tmp_path):
    port, kinds = free_port(), {}
    with living(
        tmp_path / "run",
        metrics=f"http:{port}",
        every="5 steps",
        grace="10 s",
        tiers=str(tmp_path / "far"),
    ) as process:
        wait_for(lambda: values(port).get("last_durable_step", "far"))
        kinds = values(port).kinds
        stop(process)
    with living(tmp_path / "run", metrics=f"http:{port}", attempt=2, every="5 steps"):
        wait_for(lambda: values(port).get("steps_total"))
        kinds |= values(port).kinds
    assert kinds == {metric.name: metric.kind for metric in METRICS}


def test_of_two_ranks_one_publishes(tmp_path, monkeypatch):
    port = free_port()
    monkeypatch.delenv("TRAINCKPT_METRICS", raising=False)
    ports = run_ranks(train_and_look, 2, str(tmp_path / "run"), port)
    assert ports == [True, False]


def train_and_look(rank, run, port):
    """True if this rank listens on the port, and nobody was refused it."""
    parts = tracked()
    with Checkpointer(run, every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: scrape(port))
        return ckpt._listener.metrics is not None and bool(sockets("self") & listening(port))


def test_it_listens_on_loopback_alone(tmp_path):
    port = free_port()
    with living(tmp_path / "run", metrics=f"http:{port}"):
        wait_for(lambda: scrape(port))
        assert addresses(port) == {"0100007F"}


def test_a_port_in_use_is_named_once_and_training_goes_on(tmp_path, caplog):
    parts = tracked()
    with (
        taken_port() as port,
        Checkpointer(tmp_path / "run", metrics=f"http:{port}", **parts) as ckpt,
    ):
        step(ckpt, parts)
        wait_for(lambda: warnings(caplog))
    (warning,) = warnings(caplog)
    assert f"127.0.0.1 port {port}" in warning
    assert f'metrics="http:127.0.0.1:{port + 1}"' in warning
    assert (tmp_path / "run" / "snapshots").is_dir()


def test_a_forked_worker_neither_listens_nor_answers(tmp_path):
    port, parts = free_port(), tracked()
    with Checkpointer(tmp_path / "run", every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: scrape(port))
        ours = {link for link in sockets("self") if link in listening(port)}
        assert len(ours) == 1
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                held = sockets("self") & ours
                ckpt._listener.metrics.close()
                os.write(writer, b"holds it" if held else b"free")
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            assert answer.read() == b"free"
        os.waitpid(child, 0)
        assert values(port)["running"] == 1


def listening(port):
    """The sockets that listen on a port of the loopback address."""
    return {f"socket:[{inode}]" for address, inode in listeners(port) if address == "0100007F"}


def addresses(port):
    """The addresses, as the kernel writes them, on which anybody listens to a port."""
    return {address for address, _ in listeners(port)}


def listeners(port):
    found = []
    for table in ("tcp", "tcp6"):
        lines = Path("/proc/net", table).read_text().splitlines()[1:]
        for words in map(str.split, lines):
            address, _, number = words[1].partition(":")
            if int(number, 16) == port and words[3] == "0A":
                found.append((address, words[9]))
    return found


def test_a_process_dump_finds_no_socket_and_no_thread_and_goes_on_with_both(tmp_path):
    port, parts = free_port(), tracked()
    with Checkpointer(tmp_path / "run", every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: scrape(port))
        ckpt._listener.close_connections()
        assert listening(port) == set()
        assert "trainckpt-metrics" not in {thread.name for thread in threading.enumerate()}
        ckpt._listener.reopen_connections()
        wait_for(lambda: scrape(port))


def test_after_a_dump_that_was_not_made_the_last_values_are_still_written(tmp_path):
    run, parts = tmp_path / "run", tracked()
    with Checkpointer(run, every="never", metrics=f"textfile:{tmp_path}", **parts) as ckpt:
        step(ckpt, parts)
        ckpt._listener.close_connections()
    assert Values(prom_file(tmp_path, run).read_text())["running"] == 0


def test_a_proof_publishes_nothing(tmp_path, monkeypatch):
    from trainckpt.run_directory.run_url import PROVE_VARIABLE

    (tmp_path / "proof").mkdir()
    plan = {"place": str(tmp_path / "run"), "dir": str(tmp_path / "proof")}
    monkeypatch.setenv(PROVE_VARIABLE, json.dumps(plan))
    parts = tracked()
    with Checkpointer(tmp_path / "run", metrics=f"textfile:{tmp_path}", **parts) as ckpt:
        step(ckpt, parts)
        assert ckpt._listener.metrics is None


# ---- a file for node_exporter


def test_the_file_has_the_last_values_after_the_end(tmp_path):
    folder, run, parts = tmp_path / "node_exporter", tmp_path / "run", tracked()
    folder.mkdir(mode=0o755)
    where = f"textfile:{folder}"
    with Checkpointer(run, every="1 step", metrics=where, **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: prom_file(folder, run).exists())
        early = Values(prom_file(folder, run).read_text())
        for _ in range(5):
            step(ckpt, parts)
    last = Values(prom_file(folder, run).read_text())
    assert (early["running"], last["running"]) == (1, 0)
    assert (last["steps_total"], last["last_durable_step", "local"]) == (6, 6)
    assert last["commit_seconds_count"] > early["commit_seconds_count"]
    assert sorted(path.name for path in folder.iterdir()) == [prom_file_name(str(run))]


@pytest.mark.parametrize(
    ("of_folder", "of_file"), [(0o777, 0o644), (0o2770, 0o640), (0o700, 0o600)]
)
def test_the_file_is_as_readable_as_its_folder_and_never_writable_by_others(
    tmp_path, of_folder, of_file
):
    folder, parts = tmp_path / "node_exporter", tracked()
    folder.mkdir()
    folder.chmod(of_folder)
    before = os.umask(0o077)
    try:
        with Checkpointer(tmp_path / "run", metrics=f"textfile:{folder}", **parts) as ckpt:
            step(ckpt, parts)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == of_file


def test_a_folder_that_is_not_there_is_named_once_and_training_goes_on(tmp_path, caplog):
    parts = tracked()
    with Checkpointer(tmp_path / "run", metrics=f"textfile:{tmp_path}/none", **parts) as ckpt:
        step(ckpt, parts)
    (warning,) = warnings(caplog)
    assert f"{tmp_path}/none" in warning
    assert "--collector.textfile.directory" in warning


def test_a_relative_folder_is_that_of_the_start(tmp_path, monkeypatch):
    run, parts = tmp_path / "run", tracked()
    (tmp_path / "metrics").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpointer(run, metrics="textfile:metrics", **parts) as ckpt:
        monkeypatch.chdir(tmp_path / "elsewhere")
        step(ckpt, parts)
    assert Values(prom_file(tmp_path / "metrics", run).read_text())["running"] == 0


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_is_named_as_one_and_nothing_half_written_is_left(tmp_path, caplog):
    folder, parts = tmp_path / "node_exporter", tracked()
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        (folder / "other").write_bytes(b"x" * 4096)
        with Checkpointer(tmp_path / "run", metrics=f"textfile:{folder}", **parts) as ckpt:
            step(ckpt, parts)
        left = [path.name for path in folder.iterdir()]
    finally:
        subprocess.run(["umount", folder], check=True)
    (warning,) = warnings(caplog)
    assert "No space left on device" in warning
    assert f"free space, or quota of this user, in {folder}" in warning
    assert left == ["other"]
    assert (tmp_path / "run" / "snapshots").is_dir()


def test_a_package_that_cannot_be_imported_costs_metrics_and_nothing_else(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.delitem(sys.modules, "trainckpt.metrics.prometheus_output")
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)  # half of it is there
    parts = tracked()
    with Checkpointer(tmp_path / "run", metrics=f"textfile:{tmp_path}", **parts) as ckpt:
        step(ckpt, parts)
    (warning,) = warnings(caplog)
    assert "pip install 'trainckpt[metrics]'" in warning
    assert (tmp_path / "run" / "snapshots").is_dir()


def test_what_a_killed_process_left_of_a_write_goes_away(tmp_path):
    run, parts = tmp_path / "run", tracked()
    left = tmp_path / f".{prom_file_name(str(run))}.0badcafe.tmp"
    left.write_text("trainckpt_run")
    with Checkpointer(run, metrics=f"textfile:{tmp_path}", **parts) as ckpt:
        step(ckpt, parts)
    assert not left.exists()
    assert prom_file(tmp_path, run).exists()


def test_two_runs_of_one_name_have_two_files_and_no_name_leaves_the_folder():
    names = [prom_file_name(run) for run in ("/a/gpt", "/b/gpt", "s3://bucket/../x y", "/")]
    assert len(set(names)) == 4
    assert all("/" not in name and name.endswith(".prom") for name in names)
    assert names[0].startswith("trainckpt-gpt-")


@pytest.mark.parametrize("name", [b'a"b\\n{c}', "é\n y".encode(), b"z\xff"])
def test_a_place_of_any_name_is_a_label_and_a_file(tmp_path, caplog, name):
    run, parts = tmp_path / os.fsdecode(name), tracked()
    with Checkpointer(run, every="never", metrics=f"textfile:{tmp_path}", **parts) as ckpt:
        step(ckpt, parts)
    found = Values(prom_file(tmp_path, run).read_text())
    assert found.run[0] == str(run).encode(errors="backslashreplace").decode()
    assert warnings(caplog) == []


# ---- what goes wrong is counted


def test_saves_that_fail_are_counted_by_a_kind_and_never_by_their_text(tmp_path):
    run, port, parts = tmp_path / "run", free_port(), tracked()
    with Checkpointer(run, every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        (run / "snapshots").write_text("no folder")
        for _ in range(2):
            handle = ckpt.save()
            step(ckpt, parts)
            wait_for(lambda: handle.ended)  # noqa: B023 - of this round
        failed = values(port)
        (run / "snapshots").unlink()
        handle = ckpt.save()
        step(ckpt, parts)
        handle.wait("local")
        again = values(port)
    assert (failed["failed_saves_total", "storage"], failed["consecutive_failed_saves"]) == (2, 2)
    assert (again["failed_saves_total", "storage"], again["consecutive_failed_saves"]) == (2, 0)
    assert "snapshots" not in {key for _, key in failed._values}


@pytest.mark.usefixtures("without_memory")
def test_copies_that_do_not_pass_verification_are_counted_by_tier(tmp_path):
    run, far, port, parts = tmp_path / "run", tmp_path / "far", free_port(), tracked()
    how = {"every": "never", "tiers": str(far), "metrics": f"http:{port}"}
    with Checkpointer(run, **how, **parts) as ckpt:
        step(ckpt, parts)
    (shard,) = run.glob("snapshots/*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-8] ^= 1
    shard.write_bytes(data)
    with Checkpointer(run, **how, **tracked()) as ckpt:
        wait_for(lambda: scrape(port))
        found = values(port)
        assert ckpt.cursor.step == 1
    assert (found["verify_failures_total", "local"], found["verify_failures_total", "far"]) == (
        1,
        0,
    )
    assert found["restore_seconds", "far"] >= 0


@pytest.fixture
def without_memory(monkeypatch):
    monkeypatch.setenv("TRAINCKPT_MEMORY", "none")


def test_the_age_counts_from_the_launch_until_something_is_durable(tmp_path):
    port, parts = free_port(), tracked()
    with Checkpointer(tmp_path / "run", every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: scrape(port))
        first = values(port)
        time.sleep(0.1)
        ckpt.save()
        step(ckpt, parts)
        wait_for(lambda: values(port)["last_durable_step", "local"] == 1)
        later = values(port)
    assert first["last_durable_step", "local"] == 0
    assert first["last_durable_age_seconds", "local"] > 0
    assert later["last_durable_age_seconds", "local"] < first["last_durable_age_seconds", "local"]
    assert first.get("save_interval_seconds", "local") is None


def test_values_that_change_while_they_are_read_are_read_again(tmp_path):
    port, parts = free_port(), tracked()
    with Checkpointer(tmp_path / "run", every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        readings, calls = ckpt._listener.metrics._readings, []
        status = readings._status

        def changing():
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError("deque mutated during iteration")
            return status()

        readings._status = changing
        assert values(port)["running"] == 1
        assert len(calls) >= 3


@pytest.mark.parametrize(
    "kind", ["textfile:{folder}", "http:{port}", "otlp:http://127.0.0.1:{port}"]
)
def test_a_run_that_has_ended_lets_go_of_its_model(tmp_path, kind):
    where = kind.format(folder=tmp_path, port=free_port())
    held = weakref.ref(ended_run(tmp_path / "run", where))
    gc.collect()
    wait_for(lambda: "trainckpt-metrics" not in {each.name for each in threading.enumerate()})
    gc.collect()
    assert held() is None


def ended_run(run, where):
    """Train a little; return the model of the run, which has ended."""
    parts = tracked()
    with Checkpointer(run, every="never", metrics=where, **parts) as ckpt:
        step(ckpt, parts)
        ckpt._listener.metrics._readings.read()
    return parts["model"]
