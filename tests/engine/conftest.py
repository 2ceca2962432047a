"""The world is costly to make, and nobody changes it."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    # not above: it imports Triton, for which `kernels/interpreted.py` has to choose first
    from tests.engine.world import World

    return World(tmp_path_factory.mktemp("world"))
