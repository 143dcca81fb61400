"""Small runs, and their values as Prometheus' own parser reads them."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from pathlib import Path

import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from trainckpt.metrics.metric_table import METRICS
from trainckpt.metrics.prometheus_output import prom_file_name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def taken_port():
    """Yield a port on which another socket listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def scrape(port, path="/metrics"):
    """The text of the endpoint; "" while nothing answers."""
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer,
    ):
        return answer.read().decode()
    return ""


def sockets(pid):
    """The sockets that a process holds."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = str(entry.readlink())
        except OSError:
            continue
        if link.startswith("socket:"):
            found.add(link)
    return found


def prom_file(folder, run):
    return folder / prom_file_name(str(run))


class Values:
    """Parsed metrics: `values["name", own label]`; of a histogram `values["name_count"]`."""

    def __init__(self, text):
        own = {metric.name: metric.label for metric in METRICS}
        self.kinds, self.labels, self._values = {}, set(), {}
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            self.kinds[name] = family.type
            for sample in family.samples:
                key = sample.labels.get(own.get(name, ""), "")
                self.labels.add(tuple(sorted(sample.labels.keys() - {"le"})))
                self.run = sample.labels["run"], sample.labels["attempt"]
                if not sample.name.endswith("_bucket"):
                    self._values[sample.name, key] = sample.value

    def __getitem__(self, key):
        name, own = key if isinstance(key, tuple) else (key, "")
        return self._values[f"trainckpt_{name}", own]

    def get(self, name, own=""):
        return self._values.get((f"trainckpt_{name}", own))


# ---- runs in this process


def tracked():
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def step(ckpt, parts):
    ckpt.boundary()
    parts["model"](torch.rand(2, 4)).sum().backward()
    parts["optimizer"].step()


def warnings(caplog):
    return [r.message for r in caplog.records if "no metrics" in r.message]
