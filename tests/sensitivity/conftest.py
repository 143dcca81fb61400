from __future__ import annotations

import pytest

from tests.sensitivity.runs import Setting


@pytest.fixture(scope="session")
def settings(server, tmp_path_factory):
    """(ranks, flags of the script) -> its `Setting`; each runs straight and is stopped once."""
    known: dict[tuple, Setting] = {}

    def setting(world: int, *flags: str) -> Setting:
        if (world, flags) not in known:
            folder = tmp_path_factory.mktemp(f"ranks{world}")
            known[world, flags] = Setting(server, folder, world, flags)
        return known[world, flags]

    return setting
