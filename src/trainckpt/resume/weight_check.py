"""Check a resume by its weights: at the same steps they must equal those of the attempt before.

    after a save    rank 0 records a digest of the weights 1, 4, 16, ... steps later, in the record
                    of its attempt
    after a resume  rank 0 compares its weights with the digests that the attempt which saved the
                    snapshot recorded, as far as it trained on before it died

Another batch, learning rate or random number changes all weights in one step, wherever the script
keeps its cause. So the check finds untracked state that no comparison of objects finds. An attempt
that stopped with its last snapshot trained no step after it: a resume from there is not checked.

The digest covers the first elements of up to 256 trained parameters: on a GPU, one small copy. In
DDP and FSDP the parameters of rank 0 depend on the gradients of all ranks.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainckpt.attempt.log import logger
from trainckpt.errors import TrainckptError
from trainckpt.format.attempt_record import MAX_BYTES
from trainckpt.format.digest import digest
from trainckpt.format.exactness import How, Restored
from trainckpt.snapshot import attempt_history
from trainckpt.state import dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.resume.report import ResumeReport
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier

FACT = "weights_after_step"  # in the record: step -> digest
_KEPT = 16  # digests in a record: enough for the snapshots that are kept
_FACTOR = 4  # between the distances from the save
_PACE_S = 1.0  # between two digests recorded: some runs save at every step
_PARAMETERS, _ELEMENTS = 256, 64
_NEVER = 1 << 62


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
        self._not_before_s = 0.0  # monotonic
        self._writing: threading.Thread | None = None
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
        now_s = time.monotonic()
        is_to_record = step >= self._record_at and now_s >= self._not_before_s
        if is_to_record or step in self._expected:
            found = weight_digest(self._registry.model_parameters().values())
            if found and step in self._expected:
                self._compare(step, found)
            if found and is_to_record:
                self._not_before_s = now_s + _PACE_S
                self._record(step, found)
        while self._record_at <= step:
            self._distance *= _FACTOR
            self._record_at = self._saved_at + self._distance
        self._plan(step)

    def _plan(self, step: int) -> None:
        to_compare = (at for at in self._expected if at > step)
        self.due_step = min(self._record_at, next(to_compare, _NEVER))

    def _compare(self, step: int, found: str) -> None:
        if self._report.exactness.reasons:
            self._expected = {}  # the resume is known to be inexact
        elif found != self._expected[step]:
            self._expected = {}
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
                "checked: the weights after step %d equal those of attempt %d, bit for bit",
                step,
                self._recorded_by,
            )

    def _record(self, step: int, found: str) -> None:
        """Write the digest into the attempt's record, beside training."""
        self._recorded[str(step)] = found
        self._recorded = dict(list(self._recorded.items())[-_KEPT:])
        if self._writing is not None and self._writing.is_alive():
            return  # a slow store: the next one is written with this one
        write = partial(self._record_writer.set_facts, {FACT: dict(self._recorded)})
        self._writing = threading.Thread(target=write, name="trainckpt-record", daemon=True)
        self._writing.start()


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
        int(step): str(found)
        for step, found in steps
        if step.isascii() and step.isdecimal() and int(step) > after_step
    }


def weight_digest(parameters: Iterable[torch.Tensor]) -> str:
    """Return the digest of the first elements of some trained parameters; "" if there are none."""
    trained = [p for p in parameters if p.requires_grad and p.layout is torch.strided]
    chosen = trained[:: -(-len(trained) // _PARAMETERS)] if trained else []
    rows = [_first_row(dtensor.local(parameter)) for parameter in chosen]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for row in rows:
        by_device.setdefault(row.device, []).append(row)
    together = [torch.cat(some).cpu() for some in by_device.values()]
    return digest(b"".join(some.numpy().tobytes() for some in together)) if together else ""


def _first_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the first elements along the last dimension, as a new tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    row = tensor[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.reshape(1)
    return row[:_ELEMENTS].clone(memory_format=torch.contiguous_format).view(torch.uint8)
