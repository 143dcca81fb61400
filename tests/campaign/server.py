"""A process that has torch and trainckpt loaded, from which the ranks of an attempt fork.

Importing torch takes seconds, a fork milliseconds. The server computes nothing, so it has one
thread and no autograd engine, and a forked rank is as good as a fresh one. Each child runs the
script as `__main__` and then leaves through the interpreter's own end, as `python SCRIPT` would.

One JSON request a line on stdin, one answer a line on stdout:

    {"script", "argv", "log", "ranks": [{variable: value}]}  ->  {"pids": [...]}
    {"python": [word, ...], "environment", "cwd", "out", "err", "enter": pid or null}
                                                             ->  {"pids": [pid]}
    {"poll": [pid, ...]}                                     ->  {"codes": [code or null, ...]}
    {"end": true}                                            ->  nothing: it ends

The second is what follows `python` on a command line: `-m MODULE`, `-c CODE` or a script. It has
that environment and no other, and the network, mounts and name of the host that process `enter`
holds. At the end of stdin the server ends too: not as long as a process that was forked beside
it holds the other end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path

PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim.lr_scheduler",
    "torch.optim.swa_utils",
    "torch.utils.data",
    "trainckpt",
)


def main() -> None:
    task = serve()
    if task is None:
        return
    if "python" in task:
        run_python(task)
    else:
        run_script(task)


def serve() -> dict | None:
    """Answer until stdin ends; in a forked rank, its task. Arguments name further modules."""
    for name in (*PRELOADED, *sys.argv[1:]):
        importlib.import_module(name)
    sys.modules["trainckpt"].Checkpointer  # noqa: B018 - loads what is loaded lazily
    sys.modules["torch"].set_num_threads(1)
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    assert threads == 1, f"{threads} threads: the children would miss them"
    gc.freeze()
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "end" in request:
            return None
        if "poll" in request:
            answer = {"codes": [poll(pid, codes) for pid in request["poll"]]}
        else:
            answer, task = (launch_one if "python" in request else launch)(request)
            if task is not None:
                return task
            for pid in answer["pids"]:
                codes.pop(pid, None)  # numbers come round again: this one is alive
        print(json.dumps(answer), flush=True)
    return None


def launch(request: dict) -> tuple[dict, dict | None]:
    """Fork every rank into one process group; (answer, None), or ({}, task) in a child."""
    pids: list[int] = []
    for rank, variables in enumerate(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            task = {"script": request["script"], "argv": request["argv"], "variables": variables}
            return {}, {**task, "log": f"{request['log']}.rank{rank}"}
        pids.append(pid)
        os.setpgid(pid, pids[0])  # both sides: whoever comes first
    return {"pids": pids}, None


def launch_one(request: dict) -> tuple[dict, dict | None]:
    """Fork one process into a session of its own. What it writes to has to be there."""
    files = [
        os.open(os.devnull, os.O_RDONLY),
        *(os.open(request[name], os.O_WRONLY | os.O_APPEND) for name in ("out", "err")),
    ]
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
    for file in files:
        os.close(file)
    return ({"pids": [pid]}, None) if pid else ({}, request)


def poll(pid: int, codes: dict[int, int]) -> int | None:
    """Exit code as `subprocess` tells it (negative: a signal), None while it runs."""
    if pid not in codes:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def run_script(task: dict) -> None:
    """Become what `python SCRIPT ARGV` is."""
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.environ.update(task["variables"])
    sys.argv = [task["script"], *task["argv"]]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[0] = str(Path(task["script"]).parent)
    runpy.run_path(task["script"], run_name="__main__")


def run_python(task: dict) -> None:
    """Become what `python WORD ...` is."""
    if task["enter"]:
        enter(task["enter"])
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    how, *rest = task["python"]
    sys.orig_argv = [sys.executable, *task["python"]]
    if how == "-m":
        sys.argv = [rest[0], *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = [how, *rest]
        sys.path[0] = str(Path(how).parent)
        runpy.run_path(how, run_name="__main__")


def enter(holder: int) -> None:
    """Be on the host whose namespaces this process holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        descriptor = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(descriptor)


if __name__ == "__main__":
    main()
