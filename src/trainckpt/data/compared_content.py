"""Compare the content of a dataset with that before a stop, to report other data after a resume.

lists, arrays and     digests of some hundred items each, as the process began: indices of a
tensors               split, names of files. If a resumed process begins with another digest,
                      other samples stand at the same indices, and that is reported. The same for
                      those that the run has replaced since, and tensors and arrays written since,
                      except in a stream
functions and         their class or name, and numbers, if the run has replaced them since: a
transforms            transform that is chosen at one epoch
samples in a dict     digests of a few. A resume begins with an empty cache; if the same key gets
                      another sample later, it was made by random draws, and that is reported

Numbers and texts are not compared but restored, by `restored_numbers`.
"""

from __future__ import annotations

import os.path
import types
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from trainckpt.data import randomness
from trainckpt.data.carried_state import is_tensor
from trainckpt.data.pass_history import fingerprint
from trainckpt.data.randomness import as_bytes
from trainckpt.data.restored_numbers import attributes_inside, is_function_or_object
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

    from trainckpt.format.exactness import Report

_NUMBERS = (bool, int, float, str)
_ITEMS = 256  # compared of a sequence, spread over it
_DEPTH = 3  # a list of records
_FEW = 16  # tensors in a tuple, as in a TensorDataset
_DIGESTS = 64  # values compared of one dataset
_WHOLE_BYTES = 16 << 20  # compared whole, of a tensor that is written by the run


class ComparedContent:
    """The content of one loader's dataset: digests for a snapshot, and reports of other content.

    It is built as the process begins, so that changes by the run are told from other content.
    """

    def __init__(self, loader: DataLoader[Any], name: str, report: Report) -> None:
        self._loader = loader
        self._name = name
        self._report = report
        self._as_begun = content(loader.dataset)
        # a stream may write its arrays as it is read
        is_stream = isinstance(loader.dataset, IterableDataset)
        self._marks = {} if is_stream else marks(loader.dataset)
        self._cached_before: dict[str, list[Any]] = {}  # of before a stop, not made again

    def state(self) -> dict[str, Any]:
        """Return the digests for a snapshot."""
        dataset = self._loader.dataset
        return {
            "content": self._as_begun,
            "changed content": changed(dataset, self._marks) if self._marks else {},
            "cached": self.compare_cached()
            | ({} if self._loader.num_workers else cached(dataset)),  # workers have their own
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Compare samples in caches with those of a result of `state` from now on."""
        self._cached_before = saved.get("cached", {})

    def compare(self, saved: dict[str, Any]) -> None:
        """Report lists, arrays and tensors that are not those of a result of `state`."""
        was_changed = saved.get("changed content", {})
        then, now = saved.get("content", {}), self._as_begun
        paths = then.keys() & now.keys() - was_changed.keys()
        self._report_paths(
            sorted(path for path in paths if then[path] != now[path]),
            "differs from the snapshot's, so other samples stand at the same indices: seed what "
            "splits or shuffles them, and sort what a folder lists. Data may differ from the "
            "uninterrupted run",
        )
        self._report_paths(
            others(self._loader.dataset, was_changed),
            "was replaced or written during training, and is not as when it was saved: set it "
            "again before the loop asks for a batch, from what is tracked. Data may differ from "
            "the uninterrupted run",
        )

    def compare_cached(self) -> dict[str, list[Any]]:
        """Report samples made anew since a resume, and otherwise; return those not made yet."""
        different, missing = cached_again(self._loader.dataset, self._cached_before)
        self._cached_before = {} if different else missing  # reported once
        self._report_paths(
            different,
            "keeps other samples at the same keys than before the stop, so random draws made "
            "them: give the dataset state_dict and load_state_dict, or seed the draws of a sample "
            "by its index. Data differs from the uninterrupted run",
        )
        return self._cached_before

    def _report_paths(self, paths: list[str], reason: str) -> None:
        if paths:
            sentence = f"{self._name}: {', '.join(paths)[:200]} {reason}"
            self._report(Restored(self._name, How.NOT_KEPT, sentence))


def content(dataset: Any) -> dict[str, bytes]:
    """Return path -> digest of the lists, arrays and tensors inside a dataset."""
    return {path: _digest(value, 0) for path, value in _contents(dataset, with_objects=False)}


def marks(dataset: Any) -> dict[str, Any]:
    """Return path -> mark of the same: another one once it is replaced, or its tensor written."""
    return {path: _mark(value) for path, value in _contents(dataset)}


def changed(dataset: Any, begun: Mapping[str, Any]) -> dict[str, bytes]:
    """Return path -> digest of those that do not have these marks any more."""
    return {
        path: _whole(value)
        for path, value in _contents(dataset)
        if path in begun and _mark(value) != begun[path]
    }


def others(dataset: Any, saved: Mapping[str, bytes]) -> list[str]:
    """Return the paths whose value has another digest than in a result of `changed`."""
    if not saved:
        return []
    now = {path: _whole(value) for path, value in _contents(dataset) if path in saved}
    return sorted(path for path, digest in saved.items() if now.get(path) != digest)


def cached(dataset: Any) -> dict[str, list[Any]]:
    """Return path -> keys and digests of the first samples in each dictionary of a dataset."""
    found = {}
    for path, values in _caches(dataset):
        try:
            first = list(islice(values.items(), _FEW))
        except RuntimeError:  # a thread of the dataset adds one
            continue
        pairs = [[k, _digest(v, 0)] for k, v in first if type(k) in (int, str) and _holds(v)]
        if pairs:
            found[path] = pairs
    return found


def cached_again(
    dataset: Any, saved: Mapping[str, list[Any]]
) -> tuple[list[str], dict[str, list[Any]]]:
    """Compare with a result of `cached`.

    Returns:
        The paths with another sample at the same key, and the samples that are not there yet.
    """
    caches = dict(_caches(dataset)) if saved else {}
    others, missing = set(), dict[str, list[Any]]()
    for path, pairs in saved.items():
        values = caches.get(path, {})
        for key, digest in pairs:
            if key not in values:
                missing.setdefault(path, []).append([key, digest])
            elif _digest(values[key], 0) != digest:
                others.add(path)
    return sorted(others), missing


def _caches(dataset: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the path of each dictionary in an attribute of a dataset, or of those that it wraps."""
    path = "dataset"
    for _ in range(_DEPTH):
        names = randomness.names_of(dataset) or {}
        yield from ((f"{path}.{k}", v) for k, v in list(names.items()) if type(v) is dict)
        path, dataset = f"{path}.dataset", names.get("dataset")


def _holds(sample: Any) -> bool:
    """Return True for a tensor or array, or a sequence with one."""
    return is_tensor(sample) or (type(sample) in (list, tuple) and any(map(is_tensor, sample)))


def _contents(dataset: Any, *, with_objects: bool = True) -> Iterator[tuple[str, Any]]:
    number = 0
    for path, _, _, value in attributes_inside({"dataset": dataset}):
        is_content = type(value) in (list, tuple) or is_tensor(value)
        if is_content or (with_objects and is_function_or_object(value)):
            yield path, value
            number += 1
            if number == _DIGESTS:
                return


def _mark(value: Any) -> Any:
    if type(value) in (list, tuple):
        few = value if len(value) <= _FEW else ()
        return id(value), [_mark(item) for item in few if is_tensor(item)]
    if is_function_or_object(value):
        return id(value)
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    return id(value), None if type(value).__name__ == "memmap" else fingerprint(value)


def _whole(value: Any) -> bytes:
    """Return a digest over all bytes of tensors and arrays that are not large, else of a sample."""
    if type(value) in (list, tuple) and len(value) <= _FEW and any(map(is_tensor, value)):
        return b"".join(map(_whole, value))
    is_dense = isinstance(value, torch.Tensor) and value.is_cpu and value.layout is torch.strided
    if is_dense and not value.is_quantized and value.nbytes <= _WHOLE_BYTES:
        shape = f"{value.dtype} {tuple(value.shape)}".encode()
        return blake2b(shape + as_bytes(value.detach()), digest_size=8).digest()
    return _of_object(value, 0) if is_function_or_object(value) else _digest(value, 0)


def _of_object(value: Any, depth: int) -> bytes:
    """Return a digest of the name of a function, or of an object's class and its plain values."""
    kind = value if isinstance(value, types.FunctionType) else type(value)
    parts = [f"{kind.__module__}.{kind.__qualname__}".encode()]
    for key, part in sorted((randomness.names_of(value) or {}).items()):
        if type(part) in _NUMBERS:
            parts.append(_digest([key, part], 0))
        elif depth < _DEPTH and is_function_or_object(part):
            parts.append(_of_object(part, depth + 1))
        elif depth < _DEPTH and type(part) in (list, tuple) and len(part) <= _FEW:
            parts += [_of_object(item, depth + 1) for item in part if is_function_or_object(item)]
    return blake2b(b"\0".join(parts), digest_size=8).digest()


def _digest(value: Any, depth: int) -> bytes:
    kind = type(value)
    parts = [kind.__qualname__.encode()]
    if kind in (list, tuple, dict):
        items = list(value.items()) if kind is dict else value
        parts.append(str(len(items)).encode())
        if depth < _DEPTH:
            some = items[:: max(1, len(items) // _ITEMS)]
            # one folder holds the files here, and another one may elsewhere
            folder = _folder(some) if all(type(item) is str for item in some) else ""
            for item in some:
                text = item[len(folder) :] if type(item) is str else item
                parts.append(_digest(text, depth + 1))
    elif kind in (*_NUMBERS, bytes, complex, type(None)):
        parts.append(repr(value)[: 4 * _ITEMS].encode())
    elif is_tensor(value):
        parts.append(fingerprint(value))
        if kind.__name__ != "memmap" and len(value.shape) and value.shape[0] > 2:
            parts.append(fingerprint(value[:: max(1, value.shape[0] // 8)]))
    return blake2b(b"\0".join(parts), digest_size=8).digest()


def _folder(names: list[str] | tuple[str, ...]) -> str:
    """Return the part that all names begin with, up to the last slash in it."""
    first, last = (min(names), max(names)) if names else ("", "")
    return os.path.commonpath([first, last]) if first[:1] == last[:1] == "/" else ""
