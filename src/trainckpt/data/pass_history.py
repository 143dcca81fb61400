"""Compare the passes after a resume with those before it.

The history holds the length of the passes that ran out one after another, and the last one's order
if index lists are known. A length is expected if `len()` was right for each of them; or, to within
a tenth, if two had the same. A pass of another length, or in the order of the one before it, is a
fault of the resume.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.data.randomness import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


# ---- fingerprint of a batch, to recognise it after a resume
#
# The fingerprint covers type, shape, and the first and last kilobytes of each tensor and array. A
# batch of images thus costs no more than a batch of tokens. Tensors on devices count by type and
# shape only: reading them would wait for the device. Objects of other kinds count by type.


_ELEMENTS = 512  # at each end of a tensor
_ITEMS = 1024  # in a list or a dictionary
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(batch: Any, before: bytes = b"") -> bytes:
    """Return eight bytes that depend on a batch and on the fingerprint of the batches before it."""
    digest = hashlib.blake2b(before, digest_size=8)
    for part in _parts(batch):
        digest.update(part)
    return digest.digest()


def _parts(value: Any) -> Iterator[bytes]:
    kind = type(value)
    yield kind.__qualname__.encode()
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized:
            yield from _ends(value.detach())
    elif isinstance(value, _NUMBERS):
        yield repr(value).encode()
    elif isinstance(value, dict):
        for key in list(value)[:_ITEMS]:
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for item in value[:_ITEMS]:
            yield from _parts(item)
    elif is_dataclass(value):
        yield from _parts(vars(value))
    elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        if not value.dtype.hasobject:
            flat = value.reshape(-1)
            yield flat[:_ELEMENTS].tobytes() + flat[-_ELEMENTS:].tobytes()


def _ends(tensor: torch.Tensor) -> Iterator[bytes]:
    if not tensor.is_contiguous():  # flattening would copy all of it: use its corners
        for corner in (slice(8), slice(-8, None)):
            yield as_bytes(tensor[(corner,) * tensor.dim()].resolve_conj().resolve_neg())
        return
    flat = tensor.reshape(-1)
    for end in (flat[:_ELEMENTS], flat[-_ELEMENTS:]):
        yield as_bytes(end.resolve_conj().resolve_neg())


# ---- the history of passes


_ENOUGH = 2  # passes that agree, where nothing but chance may be why one does
_TENTH = 10
_FEW = 6  # fewer batches may come in the same order again by chance


@dataclass(frozen=True)
class PassHistory:
    """The passes that ran out since the run began, or since a pass was left early.

    Attributes:
        count: Number of these passes.
        length: Batches in each of them; None if they differ.
        announced: Batches in the running pass by `len()` as it began; None without a length.
        len_held: `announced` was right for each pass.
        order: Digest of the last pass's index lists; empty if they are unknown.
        orders_differ: No pass had the order of the one before it.
    """

    count: int = 0
    length: int | None = None
    announced: int | None = None
    len_held: bool = True
    order: bytes = b""
    orders_differ: bool = True

    @property
    def expected(self) -> int | None:
        """Number of batches expected in the running pass; None if unknown."""
        if self.count and self.len_held:
            return self.announced
        return self.length if self.count >= _ENOUGH else None

    def add(self, batches: int, order: bytes) -> PassHistory:
        """Return the history with the running pass, now run out."""
        return PassHistory(
            count=self.count + 1,
            length=batches if self.count == 0 or self.length == batches else None,
            announced=None,
            len_held=self.len_held and self.announced == batches,
            order=order,
            orders_differ=self.orders_differ and order != self.order,
        )

    def fault(self, batches: int, order: bytes) -> str:
        """Return the fault of the running pass, now run out; empty if there is none.

        Example: "ended after 2 batches, where 6 were expected (as in each of the 3 passes before)".
        """
        expected = self.expected
        if expected is not None and abs(batches - expected) > self._slack:
            return (
                f"ended after {batches} batches, where {expected} were expected ({self._basis()})"
            )
        alike = self.count >= _ENOUGH and self.length == batches >= _FEW
        if alike and self.orders_differ and order == self.order:
            return f"had its {batches} batches in the order of the pass before; orders had differed"
        return ""

    def excess(self, batches: int) -> str:
        """Return the fault of a pass with this many batches so far; empty if there is none."""
        expected = self.expected
        if expected is None or batches <= expected + self._slack:
            return ""
        return f"has a batch {batches}, where {expected} were expected ({self._basis()})"

    @property
    def _slack(self) -> int:
        # Filtered or packed streams have passes of about one length; some agree by chance.
        return 0 if self.len_held else (self.length or 0) // _TENTH

    def _basis(self) -> str:
        if self.len_held:
            return "by len(), which had been right"
        return f"as in each of the {self.count} passes before"


def announced(facts: dict[str, Any]) -> int | None:
    """Return the batches of a pass by `len()`, from a loader's facts; None without a length."""
    batches: int | None = facts.get("length", facts.get("sampler length"))
    samples: int | None = facts.get("dataset length")
    size: int | None = facts.get("batch_size")
    if batches is not None or samples is None or not size:
        return samples if batches is None else batches
    return samples // size if facts["drop_last"] else -(-samples // size)
