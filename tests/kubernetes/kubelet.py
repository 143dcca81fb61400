"""A kubelet of ours: the part of a Kubernetes node that a stop of a training run goes through.

Real in these tests: etcd, the API server (admission, eviction, graceful deletion, priorities), the
Job controller, the scheduler with its preemption, the garbage collector, the controllers of nodes
and of volumes. This file stands in for the kubelet and the container runtime:

    node        registers itself, says what it has (32 CPUs, 256 GiB, 8 GPUs, whatever is true),
                reports that it is ready, and renews its lease
    pod         the first container's command as process 1, in pid, mount and host name namespaces
                of its own. Its root is an overlay over this machine's, thrown away with the pod.
                There are no images, and the network is this machine's
    volumes     hostPath, a claim bound to a hostPath volume, emptyDir
    names       /etc/hosts has the pod's own, and those of all pods of its `subdomain`, each with a
                loopback address of its own
    variables   those of the manifest, KUBERNETES_SERVICE_HOST and _PORT, and the "image's"
    deletion    preStop (exec), then SIGTERM to process 1, and SIGKILL once
                terminationGracePeriodSeconds are over, counted from the deletion; a preStop hook
                that has used them up leaves 2 s, as the kubelet's own does. The status is reported
                before the pod is removed
    memory      limits.memory as a cgroup: the system kills who takes more, reason OOMKilled
    status      phase, exit code (128 + n for signal n), /dev/termination-log as the message,
                restartCount
    restarts    restartPolicy Always and OnFailure, at once: without the kubelet's back-off

It has no probes, init containers, sidecars or other limits. Needs root, unshare, nsenter and
overlayfs. One thread; standard library only.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults import cgroup
from tests.kubernetes.api_client import Api, ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

POLL_S, LEASE_EVERY_S, AFTER_PRE_STOP_S = 0.2, 5.0, 2.0
LEASES = "kube-node-lease"
CAPACITY = {"cpu": "32", "memory": "256Gi", "pods": "20", "nvidia.com/gpu": "8"}
NAMESPACES = ["--mount", "--pid", "--uts", "--propagation", "private"]
# In place of `unshare --fork`, which returns 1 when its child has died of SIGKILL (util-linux
# 2.38): a shell returns 137. Its first child is process 1 of the new namespace.
RUN_AND_RETURN_CODE = 'setpriv --pdeathsig KILL sh "$0"; exit $?'
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
DEVICES = ("null", "zero", "full", "random", "urandom")

ROOT_FILE_SYSTEM = """
set -eu
mount -t tmpfs pod {scratch}
mkdir {scratch}/upper {scratch}/work {root}
mount -t overlay pod -o lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work {root}
mount -t proc proc {root}/proc
mount --rbind /sys {root}/sys
for device in {devices}; do
  touch {root}/dev/$device
  mount --bind /dev/$device {root}/dev/$device
done
mkdir -p {root}/dev/shm
mount -t tmpfs -o size=64m shm {root}/dev/shm
ln -sfn /proc/self/fd {root}/dev/fd
touch {root}/dev/termination-log
mount --bind {log} {root}/dev/termination-log
hostname {name}
touch {root}/etc/hosts
mount --bind {hosts} {root}/etc/hosts
"""


class Pod:
    """One pod and the process of its first container."""

    def __init__(self, manifest: dict[str, Any], folder: Path) -> None:
        self.manifest, self.folder = manifest, folder
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        self.ends_s: float | None = None  # SIGKILL; None: not being deleted
        self.pre_stop: subprocess.Popen[bytes] | None = None
        self.terminated = False  # SIGTERM was sent
        self._resources = contextlib.ExitStack()
        self._memory: cgroup.Group | None = None
        self._out_of_memory = False

    @property
    def name(self) -> str:
        return self.manifest["metadata"]["name"]

    @property
    def namespace(self) -> str:
        return self.manifest["metadata"]["namespace"]

    @property
    def container(self) -> dict[str, Any]:
        return self.manifest["spec"]["containers"][0]

    @property
    def host_name(self) -> str:
        return self.manifest["spec"].get("hostname", self.name)

    @property
    def restarts_again(self) -> bool:
        policy = self.manifest["spec"]["restartPolicy"]
        return policy == "Always" or (policy == "OnFailure" and self.exit_code != 0)

    def start(
        self, volumes: dict[str, str], variables: dict[str, str], hosts: Sequence[str] = ()
    ) -> None:
        """Start the container.

        Args:
            volumes: Of each the folder on this machine, or "" for an emptyDir.
            variables: Beside those of the manifest.
            hosts: Lines of its /etc/hosts.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if limit := self.container.get("resources", {}).get("limits", {}).get("memory"):
            self._memory = self._resources.enter_context(cgroup.made(num_bytes(limit)))
        script = self.folder / "container.sh"
        self.write_hosts(hosts)
        script.write_text(self._script(volumes, variables))
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES),
                    *("sh", "-c", RUN_AND_RETURN_CODE, str(script)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _script(self, volumes: dict[str, str], variables: dict[str, str]) -> str:
        scratch, log = self.folder / "scratch", self.folder / "termination-log"
        scratch.mkdir(exist_ok=True)
        log.write_text("")
        root = f"{scratch}/root"
        lines = [
            ROOT_FILE_SYSTEM.format(
                scratch=scratch,
                root=root,
                log=log,
                devices=" ".join(DEVICES),
                name=self.host_name,
                hosts=self._hosts,
            )
        ]
        if self._memory is not None:
            lines.insert(0, f"echo 0 >{self._memory.folder}/cgroup.procs")  # 0: who writes it
        for mount in self.container.get("volumeMounts", []):
            source, place = volumes[mount["name"]], shlex.quote(root + mount["mountPath"])
            lines.append(f"mkdir -p {place}")
            kind = f"--bind {shlex.quote(source)}" if source else "-t tmpfs empty"
            lines.append(f"mount {kind} {place}")
        own = {entry["name"]: entry.get("value", "") for entry in self.container.get("env", [])}
        words = [f"{name}={value}" for name, value in {**variables, **own}.items()]
        command = [*self.container.get("command", []), *self.container.get("args", [])]
        lines.append(f"exec chroot {root} env -i {shlex.join([*words, *command])}")
        return "\n".join(lines) + "\n"

    def first_process(self) -> int | None:
        """Process 1 of the container, by its number outside."""
        assert self.process is not None
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def write_hosts(self, lines: Sequence[str]) -> None:
        """Replace the container's /etc/hosts, a file of this machine that it sees there.

        Never by /proc/PID/root: until the container has changed its root, that is the machine's.
        """
        self._hosts.write_text("\n".join([*lines, ""]))

    @property
    def _hosts(self) -> Path:
        return self.folder / "hosts"

    def stop(self, now_s: float) -> None:
        """Go one step further towards the end of a pod that is being deleted."""
        if self.ends_s is None:
            self.ends_s = now_s + self.manifest["metadata"]["deletionGracePeriodSeconds"]
            hook = self.container.get("lifecycle", {}).get("preStop", {}).get("exec")
            pid = self.first_process()
            if hook and pid:
                command = ["nsenter", "-t", str(pid), "-m", "-p", "-r", *hook["command"]]
                self.pre_stop = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if self.pre_stop is not None and self.pre_stop.poll() is None:
            if now_s < self.ends_s:
                return
            self.pre_stop.kill()
            self.ends_s = now_s + AFTER_PRE_STOP_S
        if not self.terminated:
            self.terminated = True
            self._send(signal.SIGTERM)
        elif now_s >= self.ends_s:
            self._send(signal.SIGKILL)

    def kill(self) -> None:
        """End it at once, with all its processes."""
        if self.process is not None and self.process.poll() is None:
            self._send(signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self._release()

    def _send(self, signum: int) -> None:
        pid = self.first_process()
        if pid is not None:
            subprocess.run(["kill", f"-{int(signum)}", str(pid)], check=False)

    def has_ended(self) -> bool:
        if self.process is None or self.process.poll() is None:
            return False
        code = self.process.returncode
        self.exit_code = code if code >= 0 else 128 - code
        self._release()
        return True

    def _release(self) -> None:
        """Give back its cgroup, and keep what that knows of how the container ended."""
        if self._memory is not None:
            self._out_of_memory = self.exit_code == 137 and self._memory.num_killed > 0
            self._memory = None
        self._resources.close()

    def status(self) -> dict[str, Any]:
        """For the API server, as it is now."""
        if self.exit_code is None:
            phase, state = "Running", {"running": {"startedAt": stamp()}}
        else:
            phase = "Failed" if self.exit_code else "Succeeded"
            message = (self.folder / "termination-log").read_text(errors="replace")
            failure = "OOMKilled" if self._out_of_memory else "Error"
            reason = failure if self.exit_code else "Completed"
            ended = {"exitCode": self.exit_code, "reason": reason, "message": message}
            state = {"terminated": {**ended, "finishedAt": stamp()}}
        container = {
            "name": self.container["name"],
            "state": state,
            "ready": phase == "Running",
            "restartCount": self.restarts,
            "image": self.container["image"],
            "imageID": "",
        }
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        return {"phase": phase, "conditions": [ready], "containerStatuses": [container]}


class Kubelet:
    """One node.

    Args:
        variables: What an image would set, such as PATH.
    """

    def __init__(self, api: Api, name: str, folder: Path, variables: dict[str, str]) -> None:
        self._api, self._name, self._folder = api, name, folder
        service = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)}
        self._variables = {**variables, **service}
        self._pods: dict[str, Pod] = {}
        self._leased_s = 0.0
        self._ends = False

    def run(self) -> None:
        """Until SIGTERM, which ends the pods too."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_ends", True))
        try:
            self._register()
            while not self._ends:
                self._renew_lease()
                self._look()
                time.sleep(POLL_S)
        finally:
            for pod in self._pods.values():
                pod.kill()

    def _register(self) -> None:
        labels = {"kubernetes.io/hostname": self._name}
        self._api.create("nodes", {"metadata": {"name": self._name, "labels": labels}})
        lease = {"metadata": {"name": self._name}, "spec": {"holderIdentity": self._name}}
        self._api.create("leases", lease, LEASES)
        status = {"capacity": CAPACITY, "allocatable": CAPACITY}
        self._api.patch("nodes", f"{self._name}/status", {"status": status})
        self._report_ready()

    def _report_ready(self) -> None:
        """Also for a node that was lost, whose condition is Unknown until it reports again."""
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": stamp()}
        self._api.patch("nodes", f"{self._name}/status", {"status": {"conditions": [ready]}})

    def _renew_lease(self) -> None:
        if time.monotonic() < self._leased_s + LEASE_EVERY_S:
            return
        self._leased_s = time.monotonic()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"renewTime": now, "leaseDurationSeconds": 40}
        self._api.patch("leases", self._name, {"spec": spec}, LEASES, how="merge")
        self._report_ready()

    def _look(self) -> None:
        """Start new pods, report ended ones, stop those being deleted."""
        mine = self._api.list("pods", fieldSelector=f"spec.nodeName={self._name}")
        manifests = {pod["metadata"]["uid"]: pod for pod in mine}
        for uid in self._pods.keys() - manifests.keys():
            self._pods.pop(uid).kill()  # deleted without grace
        for uid, manifest in manifests.items():
            pod = self._pods.get(uid)
            if pod is None:
                self._begin(uid, manifest)
                continue
            pod.manifest = manifest
            self._step(pod)

    def _begin(self, uid: str, manifest: dict[str, Any]) -> None:
        folder = self._folder / manifest["metadata"]["namespace"] / manifest["metadata"]["name"]
        pod = self._pods[uid] = Pod(manifest, folder)
        pod.start(self._volumes(pod), self._variables, self._hosts(pod))
        self._report(pod)

    def _step(self, pod: Pod) -> None:
        deleted = "deletionTimestamp" in pod.manifest["metadata"]
        if pod.exit_code is None and pod.has_ended():
            if pod.restarts_again and not deleted:
                pod.restarts, pod.exit_code = pod.restarts + 1, None
                pod.start(self._volumes(pod), self._variables, self._hosts(pod))
            self._report(pod)
        if not deleted:
            if pod.exit_code is None and "subdomain" in pod.manifest["spec"]:
                pod.write_hosts(self._hosts(pod))
            return
        if pod.exit_code is None:
            pod.stop(time.monotonic())
        else:
            uid = pod.manifest["metadata"]["uid"]
            only_this = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self._api.delete("pods", pod.name, pod.namespace, **only_this)

    def _report(self, pod: Pod) -> None:
        status = pod.status()
        (pod.folder / "status.json").write_text(json.dumps(status))
        try:
            self._api.patch("pods", f"{pod.name}/status", {"status": status}, pod.namespace)
        except ApiError as error:
            if error.status != 404:  # deleted without grace
                raise

    def _hosts(self, pod: Pod) -> list[str]:
        """The lines of its /etc/hosts; the pods of a subdomain end with their numbers."""
        subdomain = pod.manifest["spec"].get("subdomain")
        if not subdomain:
            return [f"127.0.0.1 localhost {pod.name}"]
        specs = [each["spec"] for each in self._api.list("pods", pod.namespace)]
        names = sorted({s["hostname"] for s in specs if s.get("subdomain") == subdomain})
        numbers = {name: 2 + int(name.rpartition("-")[2]) for name in names}
        lines = [f"127.0.0.{number} {name}.{subdomain} {name}" for name, number in numbers.items()]
        return ["127.0.0.1 localhost", *lines]

    def _volumes(self, pod: Pod) -> dict[str, str]:
        found = {}
        for volume in pod.manifest["spec"].get("volumes", []):
            host = volume.get("hostPath")
            if claim := volume.get("persistentVolumeClaim"):
                bound = self._api.get("persistentvolumeclaims", claim["claimName"], pod.namespace)
                host = self._api.get("persistentvolumes", bound["spec"]["volumeName"])["spec"][
                    "hostPath"
                ]
            found[volume["name"]] = host["path"] if host else ""
        return found


def num_bytes(quantity: str) -> int:
    """Of a quantity of memory, as `512Mi`."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    port, certificate, token_file, name, folder, variables = sys.argv[1:]
    api = Api(int(port), Path(certificate), Path(token_file).read_text())
    Kubelet(api, name, Path(folder), json.loads(variables)).run()
