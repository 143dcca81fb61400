"""The supervisor over the real torchrun: its agent, and ranks with a Checkpointer over gloo."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests.campaign import launch as campaign
from tests.launcher.survive_script import DIES_AT
from tests.limits import HANG_S
from trainckpt.cli.main import main
from trainckpt.launcher import supervisor_signals
from trainckpt.launcher.supervise import supervise
from trainckpt.launcher.torchrun_command import torchrun_command
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history

SURVIVE = Path(__file__).parent / "survive_script.py"

TRAIN = """
    import os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist, trainckpt

    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = trainckpt.Checkpointer(
        folder / "run", model=model, optimizer=optimizer, every="2 steps", grace=GRACE)
    (folder / f"made{rank}").touch()
    AFTER_CONSTRUCTION
    with ckpt:
        while ckpt.boundary() and ckpt.cursor.step < 6:
            model(torch.ones(1, 2)).sum().backward()
            if dist.is_initialized():
                dist.all_reduce(torch.ones(1))
            optimizer.step()
            optimizer.zero_grad()
            AFTER_STEP
"""
COMMITTED = """
                while not list(folder.glob("run/snapshots/s2*/manifest*")):
                    time.sleep(0.01)"""
# A call that never returns and holds the interpreter's lock; no signal interrupts it, as it would
# a sleep.
HANG = """
                import ctypes
                locked = (ctypes.c_char * 64)()
                for _ in range(2):
                    ctypes.PyDLL(None).pthread_mutex_lock(locked)"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one; no rank asks a name server that does not answer, or takes two threads."""
    for name, value in campaign.environment().items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def run(folder):
    """Supervise a script under torchrun; `act` is called once the files in `when` are there."""

    def run(text: str, ranks: int, when=(), act=None, **options):
        script = folder / "script.py"
        script.write_text(textwrap.dedent(text))

        def watch(process):
            until = time.monotonic() + HANG_S
            while not all((folder / name).exists() for name in when):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.01)
            act()

        command = torchrun_command(ranks, [], [str(script), str(folder)])
        with (folder / "log").open("ab") as log:
            return supervise(
                command, output=log, watch=watch if act is not None else None, **options
            )

    return run


def train(after_construction="pass", after_step="pass", grace=None) -> str:
    text = TRAIN.replace("AFTER_CONSTRUCTION", after_construction)
    return text.replace("AFTER_STEP", after_step).replace("GRACE", repr(grace))


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def record(folder, attempt: int):
    return attempt_history.read_attempts(open_directory(str(folder / "run")))[attempt]


def lives(pid: int) -> bool:
    return campaign.alive(pid)


def goes(pid: int) -> bool:
    """Whether it ends, once the kernel has time for the SIGKILL it was sent."""
    until = time.monotonic() + 30.0
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not lives(pid)


def test_the_code_of_the_rank_that_failed_passes_through_torchrun(run, folder):
    """No Checkpointer, and torchrun itself says 1; its report is there, as it always is."""
    text = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(3)
        time.sleep(120)
    """
    ended = run(text, 2)
    assert (ended.exit_code, ended.record) == (3, None)
    assert ended.why == "rank 1 ended with 3"
    assert "ChildFailedError" in (folder / "log").read_text()


def test_without_a_checkpointer_the_script_decides_what_a_signal_means(run):
    """torchrun passes it on, SIGUSR1 too, and would return 1."""
    text = """
        import signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        Path(sys.argv[1], "up").touch()
        time.sleep(120)
    """
    ended = run(text, 1, when=["up"], act=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert ended.exit_code == 7


@pytest.mark.parametrize("where", ["torchrun starts", "before the import", "in the import"])
def test_a_signal_in_start_up_ends_everything_with_75(run, folder, where):
    """Whether trainckpt is still to be imported, or was, and nothing was trained."""
    text = """
        import os, sys, time
        from pathlib import Path
        Path(sys.argv[1], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
        Path(sys.argv[1], "before" + os.environ["RANK"]).touch()
        if Path(sys.argv[1], "wait").exists():
            time.sleep(120)
        import trainckpt
        Path(sys.argv[1], "imported" + os.environ["RANK"]).touch()
        time.sleep(120)  # torch is being imported
    """
    if where == "before the import":
        (folder / "wait").touch()
    name = {
        "torchrun starts": [],
        "before the import": ["before0", "before1"],
        "in the import": ["imported0", "imported1"],
    }[where]
    ended = run(text, 2, when=name, act=sigterm, max_restarts=2)
    assert (ended.exit_code, ended.record, ended.restarts) == (75, None, 0)
    for number in range(2):
        with contextlib.suppress(FileNotFoundError):
            assert goes(int((folder / f"pid{number}").read_text()))
    assert not (folder / "run").exists()


def test_a_signal_after_construction_stops_at_the_first_boundary_and_quietly(run, folder):
    """The ranks have not met yet; torchrun's report on their codes would be noise."""
    wait = "[time.sleep(0.01) for _ in iter(lambda: (folder / 'go').exists(), True)]"

    def act():
        sigterm()
        until = time.monotonic() + HANG_S
        while "SIGTERM: stopping" not in (folder / "log").read_text():  # else they may be through
            assert time.monotonic() < until
            time.sleep(0.01)
        (folder / "go").touch()

    ended = run(train(wait), 2, when=["made0", "made1"], act=act, max_restarts=2)
    log = (folder / "log").read_text()
    assert ended.exit_code == 75, log
    assert ended.restarts == 0
    assert record(folder, 1).outcome["outcome"] == "stopped"
    assert "Traceback" not in log
    assert "FAILED" not in log
    assert "closing signal" not in log


def test_ranks_that_survive_another_save_before_they_are_ended(folder, monkeypatch):
    """First they have to find out; for what is in flight alone the supervisor leaves them less."""
    monkeypatch.setattr(supervisor_signals, "OTHERS_S", 5.0)  # less than the 6 s of the script
    command = torchrun_command(2, [], [str(SURVIVE), str(folder / "run")])
    with (folder / "log").open("wb") as log:
        ended = supervise(command, output=log)
    said = (folder / "log").read_text()
    assert (ended.exit_code, ended.record.outcome["outcome"]) == (137, "killed"), said
    assert "(survivors of rank 1)" in said
    last = DIES_AT - 1, DIES_AT  # the one that died may not have heard how its last step ended
    assert ended.record.outcome["snapshot"] in [f"s{step}~1.1" for step in last]


KILLED = f"""if ckpt.attempt == 1 and ckpt.cursor.step == 5:
                {COMMITTED}
                if rank == 1:
                    (folder / "struck").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                {HANG}"""


def assert_all_were_gone_soon(folder):
    """The first attempt, whose rank 1 was killed while its peers hung in a collective."""
    killed = record(folder, 1)
    assert (killed.outcome["outcome"], killed.outcome["exit_code"]) == ("killed", 137)
    assert killed.outcome["snapshot"] in ("s2~1.1", "s4~1.2")  # saves take their time
    struck = float((folder / "struck").read_text())
    assert struck + 10 <= killed.facts["started"] + killed.outcome["seconds"] < struck + 40
    assert all(map(goes, killed.facts["pids"]))


@pytest.mark.long
def test_a_killed_rank_takes_the_others_with_it_and_the_run_goes_on(run, folder):
    """The next attempt finishes. tests/faults/test_scarce_resources_of_ranks.py restarts one whose
    rank is killed."""
    said = []
    ended = run(train(after_step=KILLED), 2, max_restarts=1, say=said.append)
    log = (folder / "log").read_text()
    assert (ended.exit_code, ended.restarts) == (0, 1), log
    assert len(said) == 1
    assert said[0].startswith("rank 1 died of SIGKILL")
    assert said[0].endswith("; restart 1 of 1")
    assert_all_were_gone_soon(folder)
    finished = record(folder, 2)
    assert finished.outcome["outcome"] == "finished"
    assert finished.parent == record(folder, 1).outcome["snapshot"]


def test_who_died_is_known_though_only_torchrun_has_waited_for_it(run, folder):
    """Our thread may come too late on a busy machine, and torchrun says nothing before its end."""
    (folder / "sitecustomize.py").write_text("import os\ndel os.waitid\n")  # then it never comes
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ended = run(train(after_step=KILLED), 2, environment={"PYTHONPATH": path})
    assert ended.exit_code == 137, (folder / "log").read_text()
    assert ended.why == "rank 1 died of SIGKILL; the other ranks waited for it in vain"
    assert_all_were_gone_soon(folder)


def test_a_rank_that_holds_the_interpreters_lock_is_ended_at_the_deadline(run, folder):
    """Nothing in it can hear the signal; what was committed stands."""
    hold = f"""if ckpt.cursor.step == 4:
                {COMMITTED}
                (folder / "held").touch()
                {HANG}"""
    begun = []

    def act():
        begun.append(time.monotonic())
        sigterm()

    ended = run(train(after_step=hold, grace="3 s"), 1, when=["held"], act=act, max_restarts=2)
    assert ended.exit_code == 71, (folder / "log").read_text()
    assert ended.restarts == 0
    assert 2.6 <= time.monotonic() - begun[0] < 30
    outcome = record(folder, 1).outcome
    assert (outcome["outcome"], outcome["exit_code"]) == ("killed", 71)
    assert outcome["reason"].startswith("deadline: ")
    assert outcome["snapshot"] in ("s2~1.1", "s4~1.2")


def test_a_command_without_a_checkpointer_has_a_run_if_it_is_given_one(folder, capfd):
    """`--run` is ours before the script, and the script's behind it; `resume` launches it again."""
    script = folder / "plain.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "with open(sys.argv[2], 'a') as file:\n    print(os.environ['TRAINCKPT_RUN'], file=file)\n"
        "sys.exit(0 if Path(sys.argv[2] + '.fixed').exists() else 4)\n"
    )
    place, theirs = str(folder / "run"), str(folder / "theirs")
    argv = ["run", "--json", "--run", place, "--", str(script), "--run", theirs]
    assert main(argv) == 4
    told = json.loads(capfd.readouterr().out)
    assert (told["outcome"], told["exit_code"], told["snapshot"]) == ("failed", 4, None)
    first = record(folder, 1)
    assert first.facts["launch"] == {"kind": "torchrun", "nproc": 1, "by": "supervisor"}
    assert first.facts["argv"][-3:] == [str(script), "--run", theirs]
    assert first.facts["world"] == len(first.facts["hosts"]) == 1

    (folder / "theirs.fixed").touch()
    assert main(["resume", "--json", place]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["outcome"], told["attempt"], told["exit_code"]) == ("finished", 2, 0)
    assert (folder / "theirs").read_text().splitlines() == [place, place]
    assert record(folder, 2).state == "ended"
