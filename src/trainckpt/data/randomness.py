"""Read and write the random generators of one process as comparable values.

There are three: Python's `random`, NumPy's legacy global generator, torch's CPU generator. They are
read and written whole; nothing here draws from them or seeds them. NumPy takes part only once it
has been imported: before that its generator cannot have been used.

Values are bytes with a fixed layout (and one uint8 tensor for torch in the main process). Equal
bytes therefore mean equal randomness, on every platform.

    python  version i32, 625 words u32, has a cached gaussian u8, its value f64
    numpy   624 words u32, position i32, has a cached gaussian i32, its value f64
    torch   as torch.get_rng_state returns it
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch

from trainckpt.errors import ConfigurationError

_PYTHON = struct.Struct("<i625IBd")
_NUMPY_WORDS = 2496  # bytes; the position follows them, in the value and in NumPy's own memory
_NUMPY_TAIL = struct.Struct("<iid")


def main_rng() -> dict[str, Any]:
    """Return this process's generators: {"python": bytes, "numpy": bytes, "torch": uint8 tensor}.

    The key "numpy" is absent while NumPy is not imported.
    """
    state: dict[str, Any] = {"python": _read_python(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = _read_numpy()
    return state


def set_main_rng(state: dict[str, Any]) -> None:
    """Restore, bitwise, a result of `main_rng` or `packed_rng`; absent keys stay as they are."""
    if "python" in state:
        _write_python(state["python"])
    if "numpy" in state:
        _write_numpy(state["numpy"])
    if "torch" in state:
        torch.set_rng_state(_as_tensor(state["torch"]))


def packed_rng() -> dict[str, bytes]:
    """Return `main_rng` with torch's part as bytes too, as workers send it."""
    state: dict[str, Any] = main_rng()
    state["torch"] = as_bytes(state["torch"])
    return state


def changed_since(known: dict[str, bytes]) -> dict[str, bytes]:
    """Return the parts of `packed_rng` that differ from `known`; cheap without draws."""
    now = {"python": _read_python(), "torch": as_bytes(torch.get_rng_state())}
    if "numpy" in sys.modules and not _numpy_untouched(known.get("numpy", b"")):
        now["numpy"] = _read_numpy()
    return {key: value for key, value in now.items() if value != known.get(key)}


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a dense CPU tensor."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def replaced_numpy_generator() -> str | None:
    """Return the name of the bit generator in place of NumPy's own, or None."""
    if "numpy" not in sys.modules:
        return None
    import numpy as np

    kind = str(np.random.get_state(legacy=False)["bit_generator"])
    return None if kind == "MT19937" else kind


def _as_tensor(state: torch.Tensor | bytes) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _read_python() -> bytes:
    version, words, gauss = random.getstate()
    return _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)


def _write_python(packed: bytes) -> None:
    version, *words, has_gauss, gauss = _PYTHON.unpack(packed)
    random.setstate((version, tuple(words), gauss if has_gauss else None))


def _read_numpy() -> bytes:
    import numpy as np

    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise ConfigurationError(
            f"NumPy's global generator was replaced by {state['bit_generator']}, "
            "which trainckpt cannot restore",
            hint="keep your own numpy.random.Generator and track its state instead of "
            "numpy.random.set_bit_generator",
        )
    words: bytes = state["state"]["key"].astype("<u4", copy=False).tobytes()
    return words + _NUMPY_TAIL.pack(state["state"]["pos"], state["has_gauss"], state["gauss"])


def _numpy_untouched(known: bytes) -> bool:
    # Reading NumPy's state takes 70 us, comparing its memory 1 us. A cached gaussian is not in that
    # memory and can be used up without a draw: then the full state has to be read.
    import numpy as np

    if len(known) != _NUMPY_WORDS + _NUMPY_TAIL.size or not hasattr(np.random, "get_bit_generator"):
        return False
    generator = np.random.get_bit_generator()
    _, has_gauss, _ = _NUMPY_TAIL.unpack_from(known, _NUMPY_WORDS)
    if has_gauss or sys.byteorder != "little" or not isinstance(generator, np.random.MT19937):
        return False
    seen = _NUMPY_WORDS + 4
    return ctypes.string_at(generator.ctypes.state_address, seen) == known[:seen]


def _write_numpy(packed: bytes) -> None:
    import numpy as np

    position, has_gauss, gauss = _NUMPY_TAIL.unpack_from(packed, _NUMPY_WORDS)
    words = np.frombuffer(packed, dtype="<u4", count=_NUMPY_WORDS // 4)
    np.random.set_state(("MT19937", words, position, has_gauss, gauss))
