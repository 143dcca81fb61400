"""What is trained: a GPT with AdamW, 12 bytes of state for each parameter, alike on all ranks.

busy      forward, backward and optimizer run for real
off-cpu   a step waits, as it does for a GPU. It ends with the ranks meeting, as their gradients
          would, and the optimizer's step, whose hooks run, changes an element of each 16 KiB of
          every tensor: nothing may pass for unchanged
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

VOCABULARY, CONTEXT, TOKENS, LAYERS, HEAD = 256, 64, 16, 12, 16
BYTES_PER_PARAMETER = 12  # float32, and AdamW's two moments
STRIDE = 4096  # elements: 16 KiB


class Block(nn.Module):
    """One layer of the GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, tokens, 3, width // HEAD, HEAD)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A character-level GPT with about `num_parameters` parameters."""

    def __init__(self, num_parameters: float) -> None:
        super().__init__()
        width = max(1, round(math.sqrt(num_parameters / (12 * LAYERS)) / HEAD)) * HEAD
        layers = max(1, round(num_parameters / (12 * width * width)))
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Waiting(torch.optim.AdamW):
    """AdamW whose step changes a little of every tensor, in no time. Its first makes the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.state:
            super().step()
        for tensor in state_tensors(self):
            tensor.view(-1)[::STRIDE].add_(1e-3)


class Training:
    """The model, its optimizer, and one step after another.

    Args:
        gigabytes: State of the model and the optimizer together, 1e9 bytes.
        compute: "busy" or "off-cpu".
        step_s: How long a step waits, off the CPU.
        batch: Sequences of a busy step.
        fresh: Without optimizer state, as a script is before its first step.
    """

    def __init__(
        self,
        gigabytes: float,
        compute: str,
        step_s: float,
        device: str,
        *,
        batch: int = 1,
        fresh: bool = False,
    ) -> None:
        self.compute, self.step_s, self.device = compute, step_s, device
        torch.manual_seed(1 if fresh else 0)
        with torch.device(device):
            self.plain = GPT(gigabytes * 1e9 / BYTES_PER_PARAMETER)
            self.ids = torch.randint(VOCABULARY, (batch, TOKENS + 1))
        ranks = dist.get_world_size()
        self.model: nn.Module = self.plain
        if ranks > 1:
            self.model = DistributedDataParallel(self.plain, gradient_as_bucket_view=True)
        kind = torch.optim.AdamW if compute == "busy" else Waiting
        self.optimizer = kind(self.plain.parameters(), 1e-4, fused=True)
        if not fresh:
            self.materialise()

    def materialise(self) -> None:
        """Let the optimizer allocate its state, by a step with gradients of zero."""
        for parameter in self.plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, fence: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """One step. The optimizer's part of it happens inside of `fence()`."""
        if self.compute == "busy":
            logits = self.model(self.ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), self.ids[:, 1:])
            loss.backward()
        else:
            time.sleep(self.step_s)
            dist.barrier()
        with fence():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def wait_for_device(self) -> None:
        """Return when everything that was asked of a GPU is done."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        """Let `peak_bytes` be of what follows."""
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Bytes of the GPU's memory that torch had allocated at most; 0 on a CPU."""
        return 0 if self.device == "cpu" else torch.cuda.max_memory_allocated()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the state."""
        yield from self.plain.buffers()
        yield from state_tensors(self.optimizer)

    @property
    def num_bytes(self) -> int:
        """Bytes of the state on each rank; the replicas being alike, the unique bytes too."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def digest(self) -> str:
        """A digest of every byte of the state."""
        hashed = xxhash.xxh3_128()
        for tensor in self.tensors():
            hashed.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy())
        return hashed.hexdigest()

    def touch(self) -> None:
        """Read an element of each page: what was only mapped is read now."""
        for tensor in self.tensors():
            tensor.detach().view(-1)[::1024].sum()
        self.wait_for_device()


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters, and what the optimizer has for each, in order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            state = optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state))
