"""Hugging Face Accelerate: one line after `accelerator.prepare`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ckpt = trainckpt.accelerate.attach(accelerator, "runs/x")
    for epoch in ckpt.epochs(3):
        for batch in ckpt.loader(loader):
            ...

docs/accelerate.md says what is exact and what is refused.
"""

from trainckpt.integrations.compat import require

require("accelerate", "accelerate")

from trainckpt.integrations.accelerate_attach import (  # noqa: E402 - the extra is asked for first
    AttachedCheckpointer,
    attach,
)

__all__ = ["AttachedCheckpointer", "attach"]
