"""The example, its process group made by an Accelerator; the Checkpointer is the plain one."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@contextmanager
def process_group(_):
    accelerator = Accelerator(cpu=True)
    yield accelerator.process_index
    accelerator.end_training()


if __name__ == "__main__":
    from tests.start_commands.pace import pace

    pace()
    import char_gpt
    import flags

    flags.process_group = process_group
    flags.exit_with_code(char_gpt.main)
