"""The data: source text of the Python standard library, in noisy crops.

Real text that every machine has, so nothing is downloaded. A crop is drawn anew each time it is
asked for, *inside the loader's worker*, from Python's, NumPy's and torch's generators: the loss
depends on all three, so a resume that forgets one of them shows at once.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))  # newline and printable ASCII: 96 characters
LONGEST = 4 * 2**20  # bytes of text kept
NOISE = 0.05  # share of a crop's characters that are replaced


def stdlib_text() -> np.ndarray:
    """The stdlib's top-level modules as uint8 vocabulary ids."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return encode(b"\n".join(file.read_bytes() for file in files)[:LONGEST])


def encode(text: bytes) -> np.ndarray:
    """Text as uint8 vocabulary ids; other characters become '?'."""
    ids = np.full(256, VOCABULARY.index("?"), dtype=np.uint8)
    ids[np.frombuffer(VOCABULARY.encode(), dtype=np.uint8)] = np.arange(len(VOCABULARY))
    return ids[np.frombuffer(text, dtype=np.uint8)]


class NoisyCrops(Dataset):
    """Item i is a crop somewhere in the i-th stretch of the text, with a few wrong characters.

    Gives (i, x, y): `x` int64[context] what the model sees, `y` int64[context] what comes next.
    """

    def __init__(self, items: int, context: int) -> None:
        self.text = stdlib_text()
        self.items, self.context = items, context
        self.stretch = len(self.text) // items  # characters per item

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        start = i * self.stretch + random.randrange(self.stretch - self.context)
        crop = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        noisy = torch.from_numpy(np.random.random(self.context) < NOISE)
        wrong = torch.randint(len(VOCABULARY), (self.context,))
        return i, torch.where(noisy, wrong, crop[:-1]), crop[1:]


def stdlib_loader(items: int, context: int, args, share=None) -> DataLoader:
    """A shuffling loader; of several ranks each reads its `share` (which, of how many).

    With a share the order of an epoch is the same however many share it, one alone too: so a run
    can go on with another number of ranks.
    """
    crops, sampler = NoisyCrops(items, context), None
    if share or args.parallel == "ddp":
        which, of = share or (None, None)  # None: this rank, of all ranks
        sampler = DistributedSampler(crops, num_replicas=of, rank=which, seed=args.seed)
    return DataLoader(
        crops, args.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=args.workers
    )
