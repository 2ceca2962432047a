"""The whole engine on a tiny model, driven iteration by iteration: whatever arrives, leaves, is
cancelled or is pushed out of the pool, every finished greedy answer is PEFT's."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.messages import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    AdapterRef,
    EngineSettings,
    Failed,
    Finished,
    Sampling,
    Submit,
)
from gateway.engine.model.errors import ModelError
from tests.engine.tiny import CONFIGS, save_adapter, save_model
from tests.engine.world import ADAPTERS, GREEDY, Driver, World, prompt


@pytest.fixture
def driver(world: World) -> Iterator[Driver]:
    engine = world.engine()
    yield Driver(engine)
    engine.close()


def test_one_batch_mixes_all_adapters_and_none(world: World, driver: Driver):
    for index, ref in enumerate(world.refs):  # so that none comes in when another has ended
        driver.submit(Submit(f"first {index}", prompt(index, 5), 1, GREEDY, ref))
    driver.finish()
    for index, ref in enumerate(world.refs):
        driver.submit(Submit(str(index), prompt(index, 5), 12, GREEDY, ref))
    driver.finish()
    for index, ref in enumerate(world.refs):
        assert driver.tokens[str(index)] == world.answer(ref, prompt(index, 5), 12)
    assert driver.engine.stats("").batch_adapters_max == len(ADAPTERS)


def test_the_adapters_change_the_answer(world: World):
    """Else the equalities here would prove nothing."""
    answers = {tuple(world.answer(ref, prompt(1, 6), 8)) for ref in world.refs}
    assert len(answers) == len(world.refs)


requests = st.lists(
    st.tuples(
        st.integers(0, len(ADAPTERS)),  # adapter
        st.sampled_from([1, 2, 4, 5, 17, 23]),  # prompt length
        st.integers(1, 9),  # tokens to generate
        st.integers(0, 6),  # steps before the next arrival
        st.booleans(),  # is cancelled when the next one arrives
    ),
    min_size=1,
    max_size=10,
)


@settings(deadline=None, max_examples=40)
@given(
    requests=requests, pages=st.sampled_from([60, 90, 200]), step_tokens=st.sampled_from([8, 64])
)
def test_no_schedule_changes_an_answer(
    world: World,
    requests: list[tuple[int, int, int, int, bool]],
    pages: int,
    step_tokens: int,
):
    """Random arrivals and cancels over a pool that at its smallest holds one adapter at a time."""
    driver = Driver(world.engine(pages, step_tokens=step_tokens))
    kept = []
    for index, (adapter, length, count, steps, cancelled) in enumerate(requests):
        request = Submit(str(index), prompt(length, length), count, GREEDY, world.refs[adapter])
        driver.submit(request)
        for _ in range(steps):
            driver.step()
        if cancelled:
            driver.engine.scheduler.cancel(str(index))
        if not cancelled or str(index) in driver.ends:
            kept.append(request)
    driver.finish()
    driver.engine.close()
    for request in kept:
        end = driver.ends[request.request_id]
        assert end == Finished(
            request.request_id, "length", len(request.prompt), request.max_tokens
        )
        expected = world.answer(request.adapter, request.prompt, request.max_tokens)
        assert driver.tokens[request.request_id] == expected


def test_a_pool_for_few_preempts_and_all_finish_alike(world: World):
    driver = Driver(world.engine(pages=20))
    for index in range(20):  # after these, the engine expects short answers
        driver.submit(Submit(f"short-{index}", prompt(index, 6), 1, GREEDY))
    driver.finish()
    for index in range(8):
        driver.submit(Submit(str(index), prompt(index, 6), 30, GREEDY))
    driver.finish()
    assert driver.engine.stats("").preemptions > 0
    for index in range(8):
        assert driver.tokens[str(index)] == world.answer(None, prompt(index, 6), 30)
    driver.engine.close()


def test_a_sampled_answer_depends_on_its_seed_only(world: World):
    alone = Driver(world.engine())
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=7)
    alone.submit(Submit("0", prompt(3, 6), 30, sampling, world.refs[2]))
    alone.finish()
    crowded = Driver(world.engine(pages=90))
    for index in range(6):
        seeded = Sampling(temperature=1.0, top_p=0.95, seed=7 + index)
        crowded.submit(Submit(str(index), prompt(3, 6), 30, seeded, world.refs[2]))
    crowded.finish()
    assert crowded.tokens["0"] == alone.tokens["0"]
    assert crowded.tokens["1"] != alone.tokens["0"]
    alone.engine.close()
    crowded.engine.close()


def test_a_late_short_request_leaves_before_an_early_long_one(driver: Driver):
    driver.submit(Submit("long", prompt(1, 4), 64, GREEDY))
    driver.step()
    driver.submit(Submit("short", prompt(2, 4), 4, GREEDY))
    for _ in range(5):
        driver.step()
    assert "short" in driver.ends
    assert "long" not in driver.ends


def test_decodes_advance_in_every_step_of_a_long_prefill(driver: Driver):
    for index in range(4):
        driver.submit(Submit(f"decode-{index}", prompt(index, 3), 60, GREEDY))
    driver.step()
    driver.submit(Submit("long", prompt(9, 100), 1, GREEDY))
    steps = 0
    while "long" not in driver.ends:
        before = {key: len(tokens) for key, tokens in driver.tokens.items() if key != "long"}
        driver.step()
        steps += 1
        assert all(len(driver.tokens[key]) == count + 1 for key, count in before.items())
    assert steps == -(-100 // 12)  # 16 tokens a step, 4 of them for the decodes


def test_cancel_frees_the_pages_at_once(world: World, driver: Driver):
    driver.submit(Submit("a", prompt(1, 20), 50, GREEDY))
    for _ in range(4):
        driver.step()
    assert driver.engine.stats("").pages_kv > 0
    driver.engine.scheduler.cancel("a")
    assert driver.engine.stats("").pages_kv == 0
    assert driver.engine.scheduler.cancel("a") == []  # again, and an unknown one: nothing happens
    assert driver.engine.scheduler.cancel("b") == []


def test_f10_a_cancelled_request_is_computed_no_further_and_tells_how_far_it_got(driver: Driver):
    driver.submit(Submit("a", prompt(1, 20), 50, GREEDY, cache_namespace="tenant"))
    driver.step()
    assert driver.engine.scheduler.cancel("a") == [Finished("a", "cancelled", 16, 0, 0)]
    driver.submit(Submit("b", prompt(1, 20), 50, GREEDY, cache_namespace="tenant"))
    for _ in range(3):
        driver.step()
    assert driver.cached["b"] == 16
    iterations = driver.engine.stats("").iterations
    end = Finished("b", "cancelled", 20, len(driver.tokens["b"]), 16)
    assert driver.engine.scheduler.cancel("b") == [end]
    assert end.completion_tokens == 3
    driver.engine.step()
    assert driver.engine.stats("").iterations == iterations
    assert not driver.engine.busy


def test_a_request_that_is_cancelled_while_it_waits_has_cost_nothing(world: World):
    driver = Driver(world.engine(running_max=1))
    driver.submit(Submit("a", prompt(1, 4), 50, GREEDY))
    driver.submit(Submit("b", prompt(1, 4), 50, GREEDY))
    driver.step()
    assert driver.engine.scheduler.cancel("b") == [Finished("b", "cancelled", 0, 0, 0)]
    driver.finish()
    driver.engine.close()


def test_a_request_that_is_cancelled_after_a_preemption_tells_all_it_had_got(world: World):
    driver = Driver(world.engine(pages=20))
    for index in range(20):  # after these, the engine expects short answers
        driver.submit(Submit(f"short-{index}", prompt(index, 6), 1, GREEDY))
    driver.finish()
    for index in range(8):
        driver.submit(Submit(str(index), prompt(index, 6), 30, GREEDY))
    while not (sent_back := [s for s in driver.engine.scheduler.waiting if s.generated]):
        driver.step()
    name = sent_back[0].id
    told = driver.engine.scheduler.cancel(name)
    assert told == [Finished(name, "cancelled", 6, len(driver.tokens[name]), 0)]
    driver.finish()
    driver.engine.close()


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(world: World, driver: Driver):
    expected = world.answer(None, prompt(4, 5), 12)
    stop = expected[5]
    driver.submit(Submit("a", prompt(4, 5), 12, GREEDY, stop_token_ids=[stop]))
    driver.finish()
    before = list(itertools.takewhile(lambda token: token != stop, expected))
    assert driver.tokens["a"] == before
    assert driver.ends["a"] == Finished("a", "stop", 5, len(before) + 1)


def test_what_never_fits_the_pool_is_refused(world: World):
    driver = Driver(world.engine(pages=10))  # 40 tokens
    driver.submit(Submit("too long", prompt(1, 40), 1, GREEDY))
    driver.submit(Submit("with adapter", prompt(1, 8), 1, GREEDY, world.refs[2]))
    driver.submit(Submit("fits", prompt(1, 8), 1, GREEDY))
    driver.finish()
    too_long, with_adapter = driver.ends["too long"], driver.ends["with adapter"]
    assert isinstance(too_long, Failed)
    assert too_long.code == "prompt_too_long"
    assert isinstance(with_adapter, Failed)
    assert with_adapter.code == "adapter_failed"  # whatever the prompt
    assert "raise engine.pool_mib" in with_adapter.detail
    assert isinstance(driver.ends["fits"], Finished)


def test_an_answer_ends_where_the_pool_does(world: World):
    driver = Driver(world.engine(pages=10))
    driver.submit(Submit("a", prompt(1, 8), 100, GREEDY))
    driver.finish()
    assert driver.ends["a"] == Finished("a", "length", 8, 32)


def test_a_full_queue_says_so(world: World):
    driver = Driver(world.engine(waiting_max=2))
    for index in range(3):
        driver.submit(Submit(str(index), prompt(1, 4), 1, GREEDY))
    end = driver.ends["2"]
    assert isinstance(end, Failed)
    assert end.code == "overloaded"
    driver.finish()


def test_a_missing_or_damaged_adapter_fails_only_its_own_requests(
    world: World, driver: Driver, tmp_path: Path
):
    original = world.refs[1]
    assert original is not None
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name in (MANIFEST_FILE, WEIGHTS_FILE):
        file = Path(original.folder) / name
        content = bytearray(file.read_bytes())
        if name == WEIGHTS_FILE:
            content[-1] ^= 1
        (damaged / file.name).write_bytes(content)
    driver.submit(Submit("missing", prompt(1, 4), 3, GREEDY, AdapterRef("m", str(tmp_path / "no"))))
    driver.submit(Submit("damaged", prompt(1, 4), 3, GREEDY, AdapterRef("d", str(damaged))))
    driver.submit(Submit("sound", prompt(1, 4), 3, GREEDY, original))
    driver.finish()
    for name, reason in (("missing", "missing from the store"), ("damaged", "checksum differs")):
        end = driver.ends[name]
        assert isinstance(end, Failed)
        assert end.code == "adapter_failed"
        assert reason in end.detail
        assert str(tmp_path) not in end.detail
    assert driver.tokens["sound"] == world.answer(original, prompt(1, 4), 3)


def test_an_adapter_that_overflows_fails_only_its_own_requests(
    world: World, driver: Driver, tmp_path: Path
):
    config = LoraConfig(r=2, lora_alpha=1, target_modules=["down_proj"])
    model = save_model(CONFIGS["llama"], tmp_path / "model")
    save_adapter(model, config, tmp_path / "adapter", seed=1)
    _scale(tmp_path / "adapter" / "adapter_model.safetensors", 1e30)
    huge = write_manifest(tmp_path / "adapter", world.info)
    driver.submit(Submit("huge", prompt(1, 4), 5, GREEDY, huge))
    driver.submit(Submit("base", prompt(1, 4), 5, GREEDY))
    driver.finish()
    end = driver.ends["huge"]
    assert isinstance(end, Failed)
    assert end.code == "not_finite"
    assert driver.tokens["base"] == world.answer(None, prompt(1, 4), 5)
    # its pages held NaN; who takes them next must not see it
    for index in range(30):
        driver.submit(Submit(str(index), prompt(2, 9), 3, GREEDY))
    driver.finish()
    assert all(driver.tokens[str(i)] == world.answer(None, prompt(2, 9), 3) for i in range(30))


def _scale(weights: Path, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: value * factor for name, value in load_file(weights).items()}, weights)


def test_a_prompt_outside_the_vocabulary_is_our_own_fault(driver: Driver):
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        driver.submit(Submit("a", [256], 1, GREEDY))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step_tokens": 4, "running_max": 8}, "step_tokens"),
        ({"block_tokens": 0}, "at least 1"),
        ({"block_tokens": 4096, "pool_mib": 1}, "raise it"),
        ({"pool_mib": 2**40}, "lower it"),
        ({"threads": 100_000}, "threads"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    world: World, options: dict[str, Any], reason: str
):
    with pytest.raises(ModelError, match=reason):
        Engine(EngineSettings(model=str(world.model_folder), **options))
