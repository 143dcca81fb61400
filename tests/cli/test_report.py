"""`trainckpt report` of real runs and recorded ones, in the terminal and as JSON."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from tests.cli.recorded_runs import T, record_run
from tests.cli.test_pause import living, wait_for
from tests.format.test_attempt_times import anything
from tests.s3_servers import BUCKET
from trainckpt import Checkpointer
from trainckpt.attempt import heartbeat
from trainckpt.attempt.live_status import LiveStatus
from trainckpt.cli import report as verb
from trainckpt.cli.main import main
from trainckpt.encryption import keys
from trainckpt.format.attempt_times import AttemptTimes
from trainckpt.format.save_history import NotKept
from trainckpt.inspect.run_report import BEING_SAVED, read_report
from trainckpt.inspect.run_status import read_status
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.catalog import NOT_COMMITTED
from trainckpt.storage.local import LocalTier

ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("TRAINCKPT_PROVE", "TRAINCKPT_SUPERVISOR", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def document(run, capsys):
    capsys.readouterr()
    assert main(["report", "--json", str(run)]) == 0
    return json.loads(capsys.readouterr().out)


def drawn(run, width, **how):
    console = Console(file=io.StringIO(), width=width, highlight=False, **how)
    console.print(verb.render(read_report(str(run))))
    return console.file.getvalue()


# ---- real runs


def test_a_run_that_was_killed_stopped_and_finished_is_reported_as_it_was(tmp_path, capsys):
    run, far = tmp_path / "run", tmp_path / "far"
    with living(run, every="5 steps", tiers=str(far)) as process:
        wait_for(lambda: read_status(str(run)).reached.steps > 12)
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    with living(run, attempt=2, every="5 steps", tiers=str(far)) as process:
        wait_for(lambda: read_status(str(run)).reached.steps > 20)
        alive = document(run, capsys)
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
    assert [each["how"] for each in alive["attempts"]] == ["dead", "alive"]
    found = document(run, capsys)
    assert [each["how"] for each in found["attempts"]] == ["dead", "stopped"]
    assert "~1." in found["attempts"][1]["parent"], "a commit just before the kill is unrecorded"
    assert found["attempts"][1]["reason"] == "SIGTERM"
    assert found["saves"]["committed"] >= 4
    account = found["account"]
    assert sum(account["buckets"].values()) == pytest.approx(account["wall_s"], abs=0.01)
    newest = found["checkpoints"][0]
    assert newest["usable"]
    assert newest["name"] == found["attempts"][1]["snapshot"]
    assert "local" in newest["tiers"]
    stages = [row for each in found["attempts"] for row in each["saves"]["rows"]]
    assert all(row["local_s"] > 0 for row in stages)
    assert any(row["copies"] for row in stages), "some arrived in the slower tier"
    assert [each["how"] for each in found["troubles"] if each["what"] == "attempt"] == ["dead"]
    assert found["advice"]["options"][0]["option"] == "every"
    assert found["every_s"] > 0
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "stopped: SIGTERM" in shown
    assert "in the run directory" in shown
    assert ESCAPE not in shown


def test_there_is_no_report_without_a_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 66
    assert "there is no run" in capsys.readouterr().err


def test_a_run_that_has_only_begun_says_that_little_is_known(tmp_path, capsys):
    attempt_history.found_run(LocalTier(tmp_path / "run"))
    found = document(tmp_path / "run", capsys)
    assert (found["attempts"], found["checkpoints"], found["advice"]) == ([], [], None)
    assert "no attempt has begun" in found["why_no_advice"]
    assert "no attempt has begun" in drawn(tmp_path / "run", 80)


def test_an_encrypted_run_is_reported_without_its_key(make_run, monkeypatch, capsys):
    monkeypatch.setenv("TRAINCKPT_ENCRYPT_TO", keys.generate().recipient)
    run = make_run()
    found = document(run, capsys)
    assert found["checkpoints"]
    assert all(each["encrypted"] for each in found["checkpoints"])
    assert "encrypted" in drawn(run, 120)


def test_a_run_in_s3_is_reported_and_a_store_that_refuses_is_named(
    moto_server, at, tmp_path, capsys, monkeypatch
):
    at(moto_server)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with Checkpointer(url, model=nn.Linear(2, 2), every="1 steps") as ckpt:
        ckpt.boundary()
        ckpt.save()
        ckpt.boundary()
    found = document(url, capsys)
    assert (found["run"], found["state"]) == (url, "finished")
    assert found["checkpoints"][0]["usable"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main(["report", url]) == 69


# ---- recorded runs


def test_a_damaged_record_is_named_and_the_rest_is_reported(tmp_path, capsys):
    run = record_run(tmp_path / "run", attempts=3)
    record = run / "attempts" / "2.json"
    record.write_bytes(record.read_bytes()[:-40])
    found = document(run, capsys)
    assert [each["how"] for each in found["attempts"]] == ["killed", "damaged", "finished"]
    (damaged,) = [each for each in found["troubles"] if each["how"] == "record damaged"]
    assert damaged["name"] == "2"
    assert "2.json" in damaged["reason"]
    assert found["account"]["wall_s"] > 0
    assert "damaged" in drawn(run, 80)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("attempts", "saves"), [(1, 4), (300, 3), (2, 5000), (1, 0)])
def test_the_summary_fits_into_the_terminal(tmp_path, width, attempts, saves):
    run = record_run(tmp_path / "run", attempts=attempts, saves=saves)
    text = drawn(run, width)
    assert max(map(len, text.splitlines())) <= width
    assert ESCAPE not in text
    assert "advice" in text
    if attempts == 300:
        assert "the last 10 of 300" in text
    if saves == 5000:
        assert "10,000 committed" in text
        assert "10,000 saves in 200 rows of at most" in text
    if not saves:
        assert "none: no attempt of this run has measured a save" in text


def test_what_a_run_says_of_itself_is_no_markup_no_secret_and_moves_no_cursor(tmp_path):
    run = record_run(
        tmp_path / "run",
        damaged="[red] \x1b[31mtoken=abcdef \r\n was refused[/red]",
    )
    for text in (drawn(run, 120), json.dumps(read_report(str(run)).to_json())):
        assert "[red]" in text, "it is no markup"
        assert "abcdef" not in text
        assert ESCAPE not in text


def test_saves_that_failed_since_the_last_commit_of_a_killed_attempt_are_told(tmp_path, capsys):
    run = record_run(tmp_path / "run", attempts=2)
    lost = [
        NotKept(snapshot="s260~1.11", how="failed", reason="token=abcdef: disk full", when=T + 140),
        NotKept(snapshot="s280~1.12", how="skipped", reason="too soon", when=T + 150),
    ]
    beat(run, 1, failed=41, skipped=1, not_saved=lost)
    found = document(run, capsys)
    assert [each["how"] for each in found["attempts"]] == ["killed", "finished"]
    assert (found["saves"]["failed"], found["saves"]["skipped"]) == (41, 1)
    told = [(each["name"], each["how"]) for each in found["troubles"] if each["what"] == "save"]
    assert told == [("s260~1.11", "failed"), ("s280~1.12", "skipped")]
    assert "abcdef" not in json.dumps(found)
    assert "41 failed" in drawn(run, 120)


def test_an_attempt_that_goes_on_beside_a_newer_one_is_alive_and_named(tmp_path, capsys):
    run = record_run(tmp_path / "run", attempts=3)
    forget_the_end(run, 2)
    beat(run, 2, written=T + 1e6)
    found = document(run, capsys)
    assert [each["how"] for each in found["attempts"]] == ["killed", "alive", "finished"]
    (told,) = [each for each in found["troubles"] if each["how"] == "goes on"]
    assert (told["name"], told["when"]) == ("2", found["attempts"][1]["account"]["ended"])
    for how in ({"age_s": 60, "written": T + 1e6}, {"written": T}):  # before the newer one began
        beat(run, 2, **how)
        assert [each["how"] for each in document(run, capsys)["attempts"]][1] == "dead"


def test_a_save_under_way_is_no_interrupted_one(tmp_path, capsys):
    run = record_run(tmp_path / "run", attempts=1)
    forget_the_end(run, 1)
    for name in ("s100~1.5", "s220~1.11"):
        (run / "snapshots" / name).mkdir(parents=True)
    beat(run, 1)
    found = document(run, capsys)
    assert [each["why_not"] for each in found["checkpoints"]] == [BEING_SAVED, NOT_COMMITTED]
    assert [each["name"] for each in found["troubles"]] == ["s100~1.5"]
    lost = NotKept(snapshot="s220~1.11", how="failed", reason="disk full", when=T + 140)
    for how in ({"age_s": 60}, {"not_saved": [lost]}):
        beat(run, 1, **how)
        found = document(run, capsys)
        assert [each["why_not"] for each in found["checkpoints"]] == [NOT_COMMITTED] * 2


def forget_the_end(run, number):
    """Take away what an attempt has recorded of its end."""
    record = attempt_history.read_attempts(LocalTier(run))[number]
    attempt_history.replace(LocalTier(run), record.with_(state="running", outcome=None))


def beat(run, number, age_s=0.0, **live):
    """Leave an attempt's heartbeat, as one that lives or was killed does."""
    path = heartbeat.path_of(LocalTier(run), number)
    path.write_text(json.dumps({"beat": 1, **LiveStatus(**{"written": T, **live}).to_json()}))
    os.utime(path, (time.time() - age_s,) * 2)


RECORDED = ("times", "saves", "hosts", "world", "started", "tiers", "tier_trouble", "before")
own_keys = st.sampled_from([*AttemptTimes(began=0, seconds=0).to_json(), "rows", "not_kept"])


@settings(max_examples=150, deadline=None)
@given(
    facts=st.dictionaries(st.sampled_from([*RECORDED, "env", "else"]), anything, max_size=3),
    inner=st.dictionaries(own_keys, anything, max_size=3),
    columns=st.dictionaries(st.sampled_from(["at", "copies", "count", "local_s"]), anything),
    outcome=st.dictionaries(st.sampled_from(["outcome", "reason", "seconds"]), anything),
)
def test_whatever_stands_in_a_record_there_is_a_report(facts, inner, columns, outcome):
    """What is valid in JSON, and of other types than ours, or of other releases."""
    with TemporaryDirectory() as folder:
        run = record_run(Path(folder) / "run", attempts=2, saves=3)
        path = run / "attempts" / "1.json"
        body = json.loads(path.read_bytes())
        del body["digest"]
        saves = {**body["saves"], "rows": {**body["saves"]["rows"], **columns}}
        body |= {"times": {**body["times"], **inner}, "saves": {**saves, **inner}}
        body |= {**facts, "outcome": {**body["outcome"], **outcome}}
        path.write_text(json.dumps(body))
        report = read_report(str(run))
        assert [each.attempt for each in report.attempts] == [1, 2]
        assert report.attempts[1].how == "finished"
        json.dumps(verb.to_json(report))
        Console(file=io.StringIO(), width=100).print(verb.render(report))


def test_records_of_older_releases_are_reported_as_far_as_they_go(tmp_path, capsys):
    run = record_run(tmp_path / "run", attempts=2)
    for number in (1, 2):
        record = attempt_history.read_attempts(LocalTier(run))[number]
        facts = {"started": record.facts["started"]}
        attempt_history.replace(LocalTier(run), record.with_(facts=facts))
    found = document(run, capsys)
    assert [each["how"] for each in found["attempts"]] == ["killed", "finished"]
    assert found["saves"]["committed"] == 0
    assert found["account"]["buckets"]["other"] > 0
    assert "unknown" in drawn(run, 100)


def test_a_terminal_gets_colors(tmp_path):
    run = record_run(tmp_path / "run")
    assert ESCAPE in drawn(run, 100, force_terminal=True, color_system="standard")
