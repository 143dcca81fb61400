"""MLflow shows each step once after three kills, in plain loops and under both trainers."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.end_to_end.test_trackers import killed, train, with_three_kills
from tests.integrations import test_loggers
from tests.integrations.lightning_training import fit

with suppress(ImportError):  # collected by `make test` too, which does not run it
    import mlflow

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=["database", "files"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path / "mlflow"
    place = f"sqlite:///{folder}.db" if request.param == "database" else f"file:{folder}"
    mlflow.set_tracking_uri(place)
    mlflow.create_experiment("here", artifact_location=f"file:{tmp_path}/artifacts")
    mlflow.set_experiment("here")
    yield place
    end_active()


def shown():
    """Step and value of each metric of the one run that is shown; and the latest."""
    mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    ids = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(ids)
    found = {}
    for name in run.data.metrics:
        found[name] = [(e.step, e.value) for e in client.get_metric_history(run.info.run_id, name)]
        assert run.data.metrics[name] == max(found[name])[1]
    return {name: sorted(events) for name, events in found.items()}


def taken_away():
    """What is shown, before all runs are deleted."""
    end_active()
    found = shown()
    for run in mlflow.search_runs(search_all_experiments=True, output_format="list"):
        mlflow.delete_run(run.info.run_id)
    return found


def end_active():
    """End what ends with a process."""
    while mlflow.active_run():
        mlflow.end_run("FAILED")


def open_log(ckpt):
    end_active()
    ckpt.track_run(mlflow.start_run())
    return lambda name, value, at: mlflow.log_metric(name, value, step=at)


@pytest.mark.usefixtures("store")
def test_mlflow_has_each_step_once_in_one_run_after_three_kills(tmp_path):
    train(tmp_path / "straight", open_log)
    expected = taken_away()
    with_three_kills(tmp_path / "run", open_log)
    assert shown() == expected


@pytest.mark.parametrize("store", ["database"], indirect=True)
def test_lightning_s_logger_has_each_step_once_in_one_run_after_three_kills(tmp_path, store):
    from lightning.pytorch.loggers import MLFlowLogger

    def logged_fit(run=None, at=None):
        module = test_loggers.cut_off(at)
        how = {"logger": [MLFlowLogger("here", tracking_uri=store)]}
        fit(run, module=module, options={"every": "1 step"}, **how)

    logged_fit()
    expected = taken_away()
    for at in test_loggers.KILLS:
        with pytest.raises(ZeroDivisionError):
            logged_fit(tmp_path / "run", at)
    logged_fit(tmp_path / "run")
    assert shown() == expected


@pytest.mark.parametrize("store", ["database"], indirect=True)
def test_the_trainer_s_report_has_each_step_once_in_one_run_after_three_kills(tmp_path, store):
    def reported(run=None, at=None):
        end_active()
        test_loggers.reported(tmp_path / "out", run, at, report_to="mlflow")

    reported()
    expected = test_loggers.untimed(taken_away())
    for at in test_loggers.FAILURES:
        with pytest.raises(ZeroDivisionError):
            reported(tmp_path / "run", at)
    reported(tmp_path / "run")
    assert test_loggers.untimed(shown()) == expected


@pytest.fixture
def server(monkeypatch):
    """A server that answers rows once `lives` is set, and counts those it has taken."""
    run = {"run_id": "one", "run_uuid": "one", "experiment_id": "0", "status": "RUNNING"}
    run |= {"start_time": 1, "artifact_uri": "/none", "lifecycle_stage": "active"}
    experiment = {"experiment_id": "0", "name": "Default", "lifecycle_stage": "active"}
    answer = json.dumps({"run": {"info": run, "data": {}}, "experiment": experiment}).encode()

    class Answers(BaseHTTPRequestHandler):
        lives, num_taken = threading.Event(), 0

        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            if "log-batch" in self.path:
                Answers.lives.wait(60)
                Answers.num_taken += 1
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST  # noqa: N815 - a name of the server's

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        mlflow.set_tracking_uri(f"http://127.0.0.1:{listening.server_port}")
        mlflow.set_experiment(experiment_id="0")
        yield Answers
        Answers.lives.set()
        end_active()
        mlflow.flush_async_logging()
        listening.shutdown()


def logs_asynchronously(ckpt):
    end_active()
    ckpt.track_run(mlflow.start_run(run_id="one"))
    return lambda name, value, at: mlflow.log_metrics({name: value}, step=at, synchronous=False)


def test_a_server_that_does_not_answer_holds_up_no_snapshot(tmp_path, server, caplog):
    train(tmp_path / "run", logs_asynchronously)
    assert server.num_taken == 0
    assert caplog.text.count("MLflow has not taken") == 1


@pytest.mark.parametrize("buffers", ["", "30"])
def test_a_snapshot_waits_for_rows_of_a_server_that_answers(tmp_path, server, monkeypatch, buffers):
    if buffers:
        monkeypatch.setenv("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", buffers)
    server.lives.set()
    killed(tmp_path / "run", logs_asynchronously, crash_at=6)  # a snapshot was taken after 4
    assert server.num_taken >= (1 if buffers else 4)
