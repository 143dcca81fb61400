"""The runs that nobody stopped."""

from __future__ import annotations

import pytest

from tests.campaign import launch
from tests.start_commands.started import Forks, Run, ended


@pytest.fixture(scope="session")
def straight(server, tmp_path_factory):
    """The uninterrupted run of so many ranks, made once."""
    made: dict[int, Run] = {}

    def straight(ranks: int) -> Run:
        if ranks not in made:
            run = Run(tmp_path_factory.mktemp("straight"), ranks)
            port = launch.free_port()
            variables = [launch.rank_variables(run.settings, r, port) for r in range(ranks)]
            script = str(launch.ROOT / "examples" / "char_gpt.py")
            whole = Forks(server, script, run.argv, run.folder / "log", variables)
            assert ended(whole) == [0] * ranks, whole.said()
            made[ranks] = run
        return made[ranks]

    return straight


@pytest.fixture
def log(tmp_path):
    """A file for what one start says; a new one at each call."""
    numbers = iter(range(1, 99))
    return lambda: tmp_path / f"start{next(numbers)}.log"
