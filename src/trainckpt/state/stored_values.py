"""Store a rank's values as one more tensor, of JSON bytes.

Used by staging, and by every reader of a snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.state.captured import VALUES
from trainckpt.state.values import UnknownValue
from trainckpt.storage.direct_io import at_address

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured

MAX_VALUES_BYTES = 1 << 30
VALUES_STEP_BYTES = 1024  # values are padded, so that the layout seldom differs from save to save


def add_values(captured: Captured) -> None:
    """Add all values as one more tensor.

    Raises:
        UnknownValue: They exceed the limit of a resume.
    """
    text = json_io.canonical(captured.values)
    text += b" " * (-len(text) % VALUES_STEP_BYTES)
    if len(text) > MAX_VALUES_BYTES:
        sizes = {part: len(json_io.canonical(tree)) for part, tree in captured.values.items()}
        most = max(sizes, key=sizes.__getitem__)
        raise UnknownValue(
            f"what is no tensor takes {len(text)} bytes, of which {most} takes {sizes[most]}; a "
            f"resume reads at most {MAX_VALUES_BYTES}",
            hint=f"let {most} keep it in tensors or NumPy arrays",
        )
    captured.tensors[VALUES] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def parse_values(raw: torch.Tensor) -> dict[str, Any]:
    """Return the values of one rank from their stored bytes.

    Raises:
        UnusableSnapshot: The bytes are not valid.
    """
    plain = raw.contiguous()
    data = at_address(plain.data_ptr(), plain.nbytes, plain) if plain.nbytes else memoryview(b"")
    parsed = json_io.parse(data, "the values", max_bytes=MAX_VALUES_BYTES)
    if not isinstance(parsed, dict):
        raise UnusableSnapshot("the values are not an object")
    return parsed
