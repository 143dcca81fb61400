"""torch.distributed.checkpoint, asynchronous, as fast as it can be set up.

A process of its own writes; the state is copied into shared memory that is kept from save to save;
plans are kept too. On a GPU that memory is pinned, and copying goes on beside the next step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.compare.systems.base import Pending
from benchmarks.compare.systems.dcp import Dcp, state_of
from torch.distributed.checkpoint import DefaultSavePlanner, async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.compare.training import Training


class DcpAsync(Dcp):
    def begin(self, training: Training) -> None:
        super().begin(training)
        gpu = training.device != "cpu"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu,
                use_shared_memory=True,
                use_async_staging=gpu,
                use_non_blocking_copy=gpu,
            )
        )
        self._staged: Any = None

    def save(self) -> Pending:
        response = async_save(
            state_of(self.training),
            checkpoint_id=self.new_path(),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        self._staged = getattr(response, "staging_completion", None)
        return Pending(getattr(response, "upload_completion", response).result)

    @contextmanager
    def _after_staging(self) -> Iterator[None]:
        if self._staged is not None:
            self._staged.result()
        yield

    def fence(self) -> AbstractContextManager[Any]:
        return self._after_staging()

    def end(self) -> None:
        self._stager.close()
        super().end()


SYSTEM = DcpAsync
