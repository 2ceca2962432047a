"""The world is costly to make, and nobody changes it."""

import pytest

from tests.engine.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))
