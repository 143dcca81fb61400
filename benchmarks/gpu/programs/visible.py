"""Train a few micro-batches with dropout and save; or go on with other devices visible.

    python visible.py RUN cuda|cpu         the first time it ends by an error after a save

Prints one JSON object: the micro-batch it went on from, and a digest of each generator then.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import trainckpt

FIRST_ENDS_AT = 3


def main() -> None:
    """Train on the device that is named."""
    place, device = sys.argv[1:]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.arange(12.0).unsqueeze(1), 1, shuffle=True)
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    with trainckpt.Checkpointer(place, **tracked, every="never") as ckpt:
        for batch in ckpt.batches():
            begun = ckpt.resumed_from.micro_batches if ckpt.resumed_from else 0
            if ckpt.cursor.micro_batches == begun:
                print(json.dumps({"resumed_from": begun, "generators": generators()}), flush=True)
            if not begun and ckpt.cursor.micro_batches == 1:
                saved = ckpt.save()
            if not begun and ckpt.cursor.micro_batches == FIRST_ENDS_AT:
                saved.wait("durable")
                raise InterruptedError("the first attempt ends here")
            model(batch.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def generators() -> dict[str, str]:
    """Return a digest of torch's generator of the CPU, and of each GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: hashlib.sha256(bytes(state)).hexdigest() for name, state in states.items()}


if __name__ == "__main__":
    main()
