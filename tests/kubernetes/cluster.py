"""A real Kubernetes control plane on this machine, with nodes of ours.

    real    etcd, kube-apiserver, kube-controller-manager, kube-scheduler, on free ports of the
            loopback device; the scheduler preempts for a higher PriorityClass
    ours    the kubelet of each node; see `kubelet.py` for what it does and does not do
    private the token and the keys, in a folder that only this user can read

`tests.daemons` starts and ends the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.campaign import launch
from tests.daemons import Daemons, free_ports, search_path, wait_for
from tests.kubernetes import custom_resources
from tests.kubernetes.api_client import Api, ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

BINARIES = Path(sys.prefix) / "kubernetes"
SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
TOOLS = ("etcd", "unshare", "nsenter", "setpriv", "mount")
CONTROLLERS = "job,garbagecollector,nodelifecycle,persistentvolume-binder,disruption,podgc"
START_S, END_S = 120.0, 20.0
NODES = ("n1", "n2")
TRY_OVERLAY = """
mount -t tmpfs try /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay try -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt
"""


class Cluster:
    """The daemons, and the API server they meet at."""

    api: Api

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons = Daemons(folder, start_s=START_S, cwd=launch.ROOT)

    def start(self) -> None:
        """Bring everything up, until all nodes are ready.

        Raises:
            CannotStart: says which daemon, and why.
        """
        port = self._start_api_server()
        config = self._client_configuration(port)
        self._daemons.start(
            "kube-controller-manager",
            found("kube-controller-manager"),
            *(f"--kubeconfig={config}", "--leader-elect=false", f"--controllers={CONTROLLERS}"),
            *("--port=0", "--secure-port=0"),
        )
        self._daemons.start(
            "kube-scheduler",
            found("kube-scheduler"),
            *(f"--kubeconfig={config}", "--leader-elect=false", "--port=0", "--secure-port=0"),
        )
        self._daemons.until("kube-apiserver", self._has_namespaces)
        custom_resources.define(self.api)
        self._daemons.until("kube-apiserver", lambda: custom_resources.defined(self.api))
        for node in NODES:
            self._run_kubelet(node, port)
        self._daemons.until("kube-controller-manager", lambda: self.ready() == set(NODES))

    def stop(self) -> None:
        """End the daemons, by their ids; the kubelets end their pods."""
        self._daemons.stop()

    # ---- nodes and pods

    def ready(self) -> set[str]:
        """Nodes that pods can be put on now."""
        return {
            node["metadata"]["name"]
            for node in self.api.list("nodes")
            if not node["spec"].get("taints") and not node["spec"].get("unschedulable")
        }

    def cordon(self, node: str, *, off: bool = False) -> None:
        """What `kubectl cordon` does, and `uncordon`."""
        self.api.patch("nodes", node, {"spec": {"unschedulable": None if off else True}})

    @contextlib.contextmanager
    def lost(self, node: str) -> Iterator[None]:
        """Within the block the node says nothing, and its pods go on: a network that is cut.

        It is entered once the controller of nodes has found out, 40 s later, and left once the node
        is ready again and has ended what was deleted meanwhile.
        """
        self._daemons.send(f"kubelet.{node}", signal.SIGSTOP)
        try:
            wait_for(lambda: node not in self.ready(), START_S)
            yield
        finally:
            self._daemons.send(f"kubelet.{node}", signal.SIGCONT)
        wait_for(lambda: node in self.ready(), START_S)

    def clear(self) -> None:
        """Delete every job and pod, without grace, until the kubelets have ended them."""
        for pod in self.api.list("pods"):
            if pod["metadata"].get("finalizers"):
                name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
                free = {"metadata": {"finalizers": None}}
                self.api.patch("pods", name, free, namespace, how="merge")
        for kind in ("jobs", "pods"):
            for item in self.api.list(kind):
                name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
                options = {"propagationPolicy": "Background"} if kind == "jobs" else {}
                self.api.delete(kind, name, namespace, gracePeriodSeconds=0, **options)
        wait_for(lambda: not self.api.list("pods"), END_S)

    def logs(self, namespace: str) -> str:
        """What the containers of all pods said."""
        files = sorted(self.folder.glob(f"kubelet.*/{namespace}/*/log"))
        return "\n".join(f"--- {f.parent.name}\n{f.read_text(errors='replace')}" for f in files)

    def statuses(self, namespace: str) -> dict[str, dict[str, Any]]:
        """The last status that a kubelet reported of each pod, also of those that are gone."""
        files = self.folder.glob(f"kubelet.*/{namespace}/*/status.json")
        return {file.parent.name: json.loads(file.read_text()) for file in files}

    # ---- daemons

    def _start_api_server(self) -> int:
        etcd, peer, port = free_ports(3)
        urls = [f"http://127.0.0.1:{number}" for number in (etcd, peer)]
        self._daemons.start(
            "etcd",
            found("etcd"),
            *("--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]),
            *("--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]),
            *("--initial-cluster", f"default={urls[1]}"),
        )
        key, token = self.folder / "service-account.key", secrets.token_hex(16)
        write_private(key, new_key())
        write_private(self.folder / "token", token)
        write_private(self.folder / "tokens.csv", f'{token},tests,tests,"system:masters"\n')
        self._daemons.start(
            "kube-apiserver",
            found("kube-apiserver"),
            f"--etcd-servers={urls[0]}",
            *("--bind-address=127.0.0.1", f"--secure-port={port}", "--advertise-address=127.0.0.1"),
            *(f"--cert-dir={self.folder}/certificates", "--endpoint-reconciler-type=none"),
            *("--anonymous-auth=false", "--authorization-mode=RBAC"),
            f"--token-auth-file={self.folder}/tokens.csv",
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *("--service-account-issuer=https://tests", "--service-cluster-ip-range=10.0.0.0/24"),
            "--disable-admission-plugins=ServiceAccount",  # no pod here talks to the server
        )
        certificate = self.folder / "certificates" / "apiserver.crt"
        self._daemons.until("kube-apiserver", certificate.exists)
        self.api = Api(port, certificate, token)
        self._daemons.until("kube-apiserver", lambda: self._answers("/readyz"))
        return port

    def _answers(self, path: str) -> bool:
        try:
            self.api.ask("GET", path)
        except (ApiError, OSError):
            return False
        return True

    def _has_namespaces(self) -> bool:
        names = {item["metadata"]["name"] for item in self.api.list("namespaces")}
        return names >= {"default", "kube-node-lease"}

    def _client_configuration(self, port: int) -> Path:
        cluster = {
            "server": f"https://127.0.0.1:{port}",
            "certificate-authority": str(self.folder / "certificates" / "apiserver.crt"),
        }
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "us", "user": {"token": (self.folder / "token").read_text()}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "us"}}],
            "current-context": "here",
        }
        path = self.folder / "kubeconfig"
        write_private(path, json.dumps(value))
        return path

    def _run_kubelet(self, node: str, port: int) -> None:
        image = {
            **{name: launch.environment()[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")},
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        }
        folder = self.folder / f"kubelet.{node}"
        folder.mkdir()
        words = (
            *(str(port), str(self.folder / "certificates" / "apiserver.crt")),
            *(str(self.folder / "token"), node, str(folder), json.dumps(image)),
        )
        command = (sys.executable, "-m", "tests.kubernetes.kubelet", *words)
        self._daemons.start(f"kubelet.{node}", *command)


def why_not() -> str:
    """Why no cluster can be started here at all, or ""."""
    missing = [name for name in (*SERVERS, *TOOLS) if not found(name)]
    if missing:
        return f"{', '.join(missing)} missing (as root on Debian 12, `make test-long` builds them)"
    if os.geteuid() != 0:
        return "pods are started as root here"
    command = ["unshare", "--mount", "sh", "-ec", TRY_OVERLAY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no overlay file system can be mounted: {done.stderr}"


def found(name: str) -> str:
    """The program's path, of ours or of the system; "" if it is not installed."""
    return shutil.which(name, path=f"{BINARIES}:{search_path()}") or ""


def new_key() -> str:
    """For the tokens of service accounts, which the server wants to be able to sign."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    ).decode()


def write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster for the block; whatever was started is ended, whatever happens."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
