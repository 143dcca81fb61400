"""Check a resume by its weights: at the same steps they must equal those of the attempt before.

    after a save    rank 0 records a digest of the weights 1, 4, 16, ... steps later, in the record
                    of its attempt
    after a resume  rank 0 compares its weights with the digests that the attempt which saved the
                    snapshot recorded, as far as it trained on before it died

Another batch, learning rate or random number changes all weights in one step, wherever the script
keeps its cause. So the check finds untracked state that no comparison of objects finds. An attempt
that stopped with its last snapshot trained no step after it: a resume from there is not checked.

The digest covers the first elements of up to 256 trained parameters and buffers: on a GPU, one
small copy. In DDP and FSDP the parameters of rank 0 depend on the gradients of all ranks.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from trainckpt.attempt.log import logger
from trainckpt.errors import TrainckptError
from trainckpt.format.attempt_record import ENDED, MAX_BYTES
from trainckpt.format.digest import digest
from trainckpt.format.exactness import How, Restored
from trainckpt.snapshot import attempt_history
from trainckpt.state import dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.resume.exactness_report import ResumeReport
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier

FACT = "weights_after_step"  # in the record: step -> digest
_KEPT = 16  # digests in a record: enough for the snapshots that are kept
_FACTOR = 4  # between the distances from the save
_STORE_PACE_S = 10.0  # between two writes to an object store: some runs save at every step
_TENSORS, _ELEMENTS = 256, 64
_NEVER, _DIGITS = 1 << 62, 18


class WeightCheck:
    """Records and compares digests of the weights, on rank 0; other ranks do nothing.

    Attributes:
        due_step: Call `reach` at the first end of a window from this step on.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        record_writer: RecordWriter,
        report: ResumeReport,
        records: bool,
        expected: Mapping[int, str],
        recorded_by: int,
    ) -> None:
        """Store the arguments.

        Args:
            registry, record_writer, report: Of the attempt.
            records: This rank records digests after its saves.
            expected: Step -> digest, after the step of the snapshot that the attempt began from.
            recorded_by: Number of the attempt that recorded them.
        """
        self._registry, self._record_writer, self._report = registry, record_writer, report
        self._records, self._recorded_by = records, recorded_by
        self._expected = dict(sorted(expected.items()))
        self._has_matched = False
        self._last_save = self._saved_at = 0  # its sequence number and step
        self._distance = 1
        self._record_at = _NEVER
        self._recorded: dict[str, str] = {}
        self._writes = _Writes(record_writer)
        self.due_step = min(self._expected, default=_NEVER)

    def note_save(self, sequence: int, step: int) -> None:
        """Record the weights some steps from now, if save number `sequence` is a new one."""
        if sequence == self._last_save or not self._records:
            return
        self._last_save, self._saved_at, self._distance = sequence, step, 1
        self._record_at = step + 1
        self._plan(step)

    def reach(self, step: int) -> None:
        """Record or compare the weights as they are after `step` steps. Training thread."""
        is_to_record = step >= self._record_at
        if is_to_record or step in self._expected:
            of_weights = weight_digest(model.module for model in self._registry.models)
            if of_weights and step in self._expected:
                self._compare(step, of_weights)
            if of_weights and is_to_record:
                self._recorded[str(step)] = of_weights
                self._recorded = dict(list(self._recorded.items())[-_KEPT:])
                self._writes.request(self._recorded)
        while self._record_at <= step:
            self._distance *= _FACTOR
            self._record_at = self._saved_at + self._distance
        self._plan(step)

    def _plan(self, step: int) -> None:
        to_compare = (at for at in self._expected if at > step)
        self.due_step = min(self._record_at, next(to_compare, _NEVER))

    def _compare(self, step: int, of_weights: str) -> None:
        if of_weights != self._expected[step]:
            self._expected = {}
            if self._report.exactness.reasons:
                return  # known to be inexact
            reason = (
                f"after step {step} the weights are not those that attempt {self._recorded_by} "
                "had there. The script uses state that is not tracked, was changed since, or runs "
                "an operation that is not deterministic: `trainckpt prove` names the first "
                "difference"
            )
            self._report.note([Restored("weights", How.NOT_KEPT, reason)])
        elif not self._has_matched:
            self._has_matched = True
            logger.info(
                "checked: the sampled weights after step %d equal those of attempt %d, bit for bit",
                step,
                self._recorded_by,
            )


class _Writes:
    """Writes the newest table into the attempt's record, on a thread beside training."""

    def __init__(self, record_writer: RecordWriter) -> None:
        self._record_writer = record_writer
        self._lock = threading.Lock()
        self._newest: dict[str, str] | None = None  # not written yet
        self._is_writing = False

    def request(self, table: dict[str, str]) -> None:
        """Have the table written soon. Training thread."""
        with self._lock:
            self._newest = dict(table)
            is_writing, self._is_writing = self._is_writing, True
        if not is_writing:
            threading.Thread(target=self._run, name="trainckpt-record", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                table, self._newest = self._newest, None
                if table is None or self._record_writer.record.state == ENDED:
                    self._is_writing = False
                    return
            self._record_writer.set_facts({FACT: table})
            if self._record_writer.is_remote:
                time.sleep(_STORE_PACE_S)


def recorded_digests(tier: Tier, attempt: int, after_step: int) -> dict[int, str]:
    """Return the digests that an attempt recorded after a step; none if its record has none."""
    key = attempt_history.record_key(attempt)
    try:
        record = attempt_history.parse(attempt, tier.read(key, max_bytes=MAX_BYTES))
    except TrainckptError:
        return {}
    table = record.facts.get(FACT)
    steps = table.items() if isinstance(table, dict) else ()
    return {
        int(step): str(recorded)
        for step, recorded in steps
        if len(step) < _DIGITS and step.isascii() and step.isdecimal() and int(step) > after_step
    }


def weight_digest(models: Iterable[nn.Module]) -> str:
    """Return the digest of the first elements of trained parameters and buffers; "" without any.

    Tensors of other classes, such as quantized ones, are left out.
    """
    changing = [tensor for model in models for tensor in _changing(model)]
    chosen = changing[:: -(-len(changing) // _TENSORS)] if changing else []
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in map(dtensor.local, chosen):
        if type(part) is torch.Tensor and part.layout is torch.strided:
            by_device.setdefault(part.device, []).append(_first_row(part))
    together = [torch.cat(rows).cpu() for rows in by_device.values()]
    return digest(b"".join(rows.numpy().tobytes() for rows in together)) if together else ""


def _changing(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the trained parameters and the persistent buffers."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                yield parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _first_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the first elements along the last dimension, as a new tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    row = tensor[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.reshape(1)
    return row[:_ELEMENTS].clone(memory_format=torch.contiguous_format).view(torch.uint8)
