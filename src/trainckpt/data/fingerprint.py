"""Compute an eight-byte fingerprint of a batch, to recognise the same batch after a resume.

The fingerprint covers type, shape, and the first and last kilobytes of each tensor and array. A
batch of images thus costs no more than a batch of tokens. Tensors on devices count by type and
shape only: reading them would wait for the device. Objects of other kinds count by type.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.data.randomness import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

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
