import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.engine.tokenizer import Tokenizer
from gateway.errors import EngineUnavailable
from gateway.inference.tokenizers import TokenizerSource
from tests.fakes import FakeEngine, byte_ids, byte_tokenizer_folder, model_info


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(model_info(byte_tokenizer_folder(tmp_path / "one")))


async def test_it_is_loaded_once_for_all_who_ask(engine: FakeEngine) -> None:
    source = TokenizerSource(engine)
    first, *rest = await asyncio.gather(*(source.get() for _ in range(20)))
    assert all(other is first for other in rest)
    assert await source.get() is first
    assert first.encode("hi") == byte_ids("hi")


async def test_another_model_has_another_tokenizer(engine: FakeEngine, tmp_path: Path) -> None:
    source = TokenizerSource(engine)
    first = await source.get()
    path = str(byte_tokenizer_folder(tmp_path / "two"))
    engine.model = msgspec.structs.replace(engine.model, digest="1" * 64, model_path=path)
    assert await source.get() is not first


async def test_without_a_model_there_is_none(engine: FakeEngine) -> None:
    engine.ready = False
    with pytest.raises(EngineUnavailable):
        await TokenizerSource(engine).get()


async def test_one_that_cannot_be_loaded_is_tried_again(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "late"
    engine.model = msgspec.structs.replace(engine.model, model_path=str(path))
    source = TokenizerSource(engine)
    with pytest.raises(EngineUnavailable, match="cannot be loaded"):
        await source.get()
    byte_tokenizer_folder(path)
    assert (await source.get()).encode("hi") == byte_ids("hi")


async def test_one_that_was_loaded_ahead_is_there_for_the_first_request(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TokenizerSource(engine)
    await source.load_ahead(engine.model.model_path)
    monkeypatch.setattr(Tokenizer, "load", None)
    assert (await source.get()).encode("hi") == byte_ids("hi")


async def test_one_that_was_loaded_ahead_does_not_serve_another_model(
    engine: FakeEngine, tmp_path: Path
) -> None:
    source = TokenizerSource(engine)
    await source.load_ahead(str(byte_tokenizer_folder(tmp_path / "two")))
    ahead = source._ahead
    assert ahead is not None
    assert await source.get() is not ahead[1]


async def test_a_failure_to_load_ahead_is_told_to_nobody_and_tried_again(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "late"
    engine.model = msgspec.structs.replace(engine.model, model_path=str(path))
    source = TokenizerSource(engine)
    await source.load_ahead(str(path))
    byte_tokenizer_folder(path)
    assert (await source.get()).encode("hi") == byte_ids("hi")
