"""Write an imported state as a new run: one attempt, with one snapshot at the start of an epoch.

The snapshot goes through the writer of every other: one shard file of one rank, streamed from the
mapped tensors, encrypted if there are recipients, then the manifest, then the commit. Its values
have a part `imported`, and lack what only the script's objects know; see `state.imported`. So the
next start of a script with this run continues from it, and `init_from` takes its weights.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.encryption import encrypted_file, keys
from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.attempt_record import ENDED, STOPPED, AttemptRecord
from trainckpt.format.cursor import Cursor
from trainckpt.format.manifest import Manifest, TensorEntry
from trainckpt.format.names import VERSION, SnapshotName
from trainckpt.inspect.import_sources import EXTRA
from trainckpt.run_directory.run_tiers import read_candidates
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.encrypted_writer import SnapshotKey
from trainckpt.snapshot.shard_writer import write_stream
from trainckpt.state import imported, staging
from trainckpt.state.adapters import gradients, rng
from trainckpt.state.capture import DDP, FSDP, LOADERS
from trainckpt.state.captured import Captured
from trainckpt.state.packed_copies import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.inspect.import_sources import ImportedState
    from trainckpt.storage.base import RunTier

GROUP = "imported"
_SAMPLE = 64  # first elements, to find equal tensors quickly


def must_be_free(tier: RunTier) -> None:
    """Refuse a place that holds a run already; an interrupted import may be repeated.

    Raises:
        ConfigurationError: by name.
    """
    if attempt_history.run_id(tier) is None:
        return
    records = attempt_history.read_attempts(tier).values()
    if read_candidates(tier) or any(imported.PART not in record.facts for record in records):
        raise ConfigurationError(f"{tier.url} holds a run already", hint="name another directory")


def write_run(
    tier: RunTier,
    state: ImportedState,
    *,
    source: str,
    recipients: Sequence[str] = (),
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Manifest:
    """Write the run; on return its snapshot is committed.

    Args:
        tier: The new run's place, free as `must_be_free` checks.
        state: From `import_sources`.
        source: Its path, for reports.
        recipients: Encrypt to them, if any.
        progress: Called with the bytes of each block after it was handed to the tier.

    Raises:
        UnknownValue: A value can only be stored by pickling it.
        TierUnavailable: The tier refused; nothing is committed.
    """
    begun_s = time.monotonic()
    captured = capture(state, source)
    run = attempt_history.found_run(tier)
    facts = {imported.PART: captured.values[imported.PART], "world": 1, "started": time.time()}
    record = attempt_history.claim(tier, lambda n: AttemptRecord(n, parent=None, facts=facts))
    name = SnapshotName(record.attempt, 1, state.step, 0)
    layouts = captured.layouts(1)
    regions = staging.describe(captured, layouts)
    shard = staging.stream(captured, regions, rank=0, world=1)
    snapshot_key = SnapshotKey(run, keys.new_key()) if recipients else None

    def blocks() -> Iterator[memoryview]:
        for block in shard.blocks():
            yield block
            progress(len(block))

    file = write_stream(
        tier,
        name,
        0,
        head=shard.head,
        num_bytes=len(shard.head) + shard.header.data_bytes,
        blocks=blocks(),
        snapshot_key=snapshot_key,
    )
    cursor = Cursor(epoch=state.epoch or 0, step=state.step)
    manifest = Manifest(
        run=run,
        name=name,
        parent=None,
        cursor=cursor,
        world=1,
        files=(file,),
        tensors={r.tensor: TensorEntry(r.dtype, r.of, layouts.get(r.tensor)) for r in regions},
        created=time.time(),
        reason=f"imported from {source}",
        writer=f"trainckpt {VERSION}",
        window=cursor,
    )
    if snapshot_key is not None:
        wrapped = keys.wrap_for_all(snapshot_key.key, recipients, run, str(name))
        manifest = encrypted_file.encrypt_manifest(manifest, snapshot_key.key, {str(name): wrapped})
    commit(tier, manifest)
    outcome = {
        "outcome": STOPPED,
        "reason": f"imported from {source}",
        "snapshot": str(name),
        "kind": "snapshot",
        "exactness": None,
        "lost_micro_batches": 0,
        "tiers": [tier.name],
        "seconds": round(time.monotonic() - begun_s, 3),
        "exit_code": 0,
    }
    ended = record.with_(state=ENDED, newest_commit=str(name), outcome=outcome)
    attempt_history.replace(tier, ended)
    return manifest


def capture(state: ImportedState, source: str) -> Captured:
    """Return the imported state as if a rank had captured it."""
    out = Captured()
    for name, tensors in state.models.items():
        out.values[name] = _model(name, tensors, state.tied.get(name, {}), out)
    for name, optimizer in state.optimizers.items():
        out.values[name] = _optimizer(name, optimizer, out)
    for name, value in state.objects.items():
        out.values[name] = out.encode(value, name, GROUP)
    out.values |= {DDP: {}, FSDP: {}, gradients.PART: {}, rng.PART: {}, LOADERS: []}
    out.values[imported.PART] = {"from": source, "format": state.format}
    return out


def _model(
    name: str, tensors: Mapping[str, Any], tied: Mapping[str, str], out: Captured
) -> dict[str, Any]:
    """Add a model's tensors. A tied name is stored too: the live model decides which is first."""
    whole = {**tensors, **{path: tensors[first] for path, first in tied.items()}}
    extra = {}
    for path, value in whole.items():
        if path.endswith(EXTRA):
            module = path.removesuffix(EXTRA).removesuffix(".")
            extra[module] = out.encode(value, f"{name}<extra>/{module}", GROUP)
        else:
            out.add(f"{name}/{path}", value, GROUP)
    twins = _twins({k: v for k, v in whole.items() if not k.endswith(EXTRA)})
    return {"tied": {}, "extra": extra, "transient": [], imported.TWINS: twins}


def _twins(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return path -> first path of a tensor of several elements with the same bytes."""
    met: dict[Any, list[str]] = {}
    twins = {}
    for path, tensor in tensors.items():
        if tensor.dim() < 2 or tensor.layout is not torch.strided:  # tied ones are matrices
            continue
        sample = bytes(staging.bytes_of(tensor.reshape(-1)[:_SAMPLE]))
        known = met.setdefault((tensor.dtype, tuple(tensor.shape), sample), [])
        for first in known:
            if _are_same(tensors[first], tensor):
                twins[path] = first
                break
        else:
            known.append(path)
    return twins


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    at_once = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return at_once or torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous()))


def _optimizer(name: str, tree: Mapping[str, Any], out: Captured) -> dict[str, Any]:
    def named(key: Any) -> str:
        return f"{imported.BY_NUMBER}{key}" if type(key) is int else str(key)

    state = {}
    for parameter, items in tree["state"].items():
        if not isinstance(items, dict):
            raise UnusableSnapshot(f"{name} keeps a {type(items).__qualname__} for {parameter}")
        path = f"{name}/{named(parameter)}"
        state[named(parameter)] = [
            [out.encode(key, name), out.encode(value, f"{path}/{key}", GROUP)]
            for key, value in items.items()
        ]
    groups = [
        {
            "options": out.encode(
                {k: v for k, v in group.items() if k not in ("params", "param_names")},
                f"{name}/group{i}",
                GROUP,
            ),
            "params": [named(key) for key in group["params"]],
        }
        for i, group in enumerate(tree["param_groups"])
    ]
    return {"kind": "", "groups": groups, "state": state}
