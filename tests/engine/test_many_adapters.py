"""A thousand adapters on a pool that holds forty of them: all answer as they should, each is loaded
as seldom as can be, and nothing grows."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gateway.engine.engine import Engine
from gateway.engine.kernels import compiled_step
from gateway.engine.kernels.compiled_step import HEAD_PANELS, RANKS
from gateway.engine.kernels.step_data import Tokens, Units
from gateway.engine.kernels.team import DONE, Claims, Team
from gateway.engine.kernels.tiles import PANEL
from gateway.engine.memory.buffer import Slab
from gateway.engine.messages import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    AdapterManifest,
    AdapterRef,
    Submit,
    TargetWeights,
)
from gateway.engine.model.compiled_decoder import CompiledDecoder
from tests.engine.world import GREEDY, Driver, World, prompt

COUNT = 1_000
SHAPES = {"q_proj": (64, 64), "v_proj": (32, 64), "down_proj": (64, 128)}
"""(out_features, in_features)"""
PAGES = 300
TOKENS = 4


class Adapters:
    """Random adapters of ranks 1 to 8, their files, and the base model with each merged in."""

    def __init__(self, folder: Path, world: World) -> None:
        self.refs = [self._write(folder / str(index), index) for index in range(COUNT)]
        self._model = AutoModelForCausalLM.from_pretrained(world.model_folder).eval()

    def weights(self, index: int) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        """(A, B) by layer and target."""
        generator = torch.Generator().manual_seed(index)
        rank = 2 ** (index % 4)
        return {
            (layer, target): (
                torch.randn(rank, inputs, generator=generator) * 0.3,
                torch.randn(outputs, rank, generator=generator) * 0.3,
            )
            for layer in range(2)
            for target, (outputs, inputs) in SHAPES.items()
        }

    def _write(self, folder: Path, index: int) -> AdapterRef:
        folder.mkdir(parents=True)
        targets: list[TargetWeights] = []
        tensors: dict[str, Tensor] = {}
        for (layer, target), (a, b) in self.weights(index).items():
            name = f"{layer}.{target}"
            tensors |= {f"{name}.a": a, f"{name}.b": b}
            targets.append(TargetWeights(layer, target, len(a), 1.0, f"{name}.a", f"{name}.b"))
        save_file(tensors, folder / WEIGHTS_FILE)
        digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
        (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(AdapterManifest(digest, targets)))
        return AdapterRef(digest, str(folder))

    @torch.inference_mode()
    def would_answer(self, index: int, prompts: list[list[int]], answers: list[list[int]]) -> bool:
        """Whether the model with W + B·A for weights gives these; prompts are of one length."""
        layers = self._model.model.layers
        before = {}
        for (layer, target), (a, b) in self.weights(index).items():
            part = layers[layer].mlp if target == "down_proj" else layers[layer].self_attn
            weight = getattr(part, target).weight
            before[weight] = weight.clone()
            weight += b @ a
        tokens = [[*p, *answer[:-1]] for p, answer in zip(prompts, answers, strict=True)]
        chosen = self._model(torch.tensor(tokens)).logits.argmax(-1)[:, len(prompts[0]) - 1 :]
        for weight, values in before.items():
            weight.copy_(values)
        return bool((chosen == torch.tensor(answers)).all())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, world: World) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"), world)


def digest_of(engine: Engine) -> str:
    """Of the base weights as they are now."""
    assert isinstance(engine._decoder, CompiledDecoder)
    found = hashlib.sha256()
    for values in engine._decoder._model:
        found.update(np.asarray(values).tobytes())
    return found.hexdigest()


def test_the_merged_adapters_differ(world: World, adapters: Adapters):
    """Nine in ten change the answer, else the equalities below would prove little."""
    base = world.answer(None, prompt(0, 6), TOKENS)
    same = sum(adapters.would_answer(index, [prompt(0, 6)], [base]) for index in range(100))
    assert same <= 10


def test_row_2b_a_thousand_adapters_on_a_pool_for_forty(world: World, adapters: Adapters):
    """3,000 requests at once, in round-robin order: in the order of arrival each would load its
    adapter anew. Grouped, as they came together, each adapter is loaded once."""
    engine = world.engine(PAGES, waiting_max=3_000, running_max=12, step_tokens=64)
    SlowStore(engine, steps=0)
    driver = Driver(engine)
    before = digest_of(engine)
    for index in range(3 * COUNT):
        ref = adapters.refs[index % COUNT]
        driver.submit(Submit(str(index), prompt(index, 6), TOKENS, GREEDY, ref))
    resident = []
    while engine.scheduler.waiting or engine.scheduler.running:
        driver.take(engine.step())
        resident.append(engine.pager.resident_count)
    driver.check()
    assert 30 <= max(resident) <= 70  # forty-five of mean size
    assert engine.pager.reads == COUNT
    assert engine.pager.loads == COUNT
    assert digest_of(engine) == before
    for index in range(COUNT):
        names = [index, index + COUNT, index + 2 * COUNT]
        answers = [driver.tokens[str(name)] for name in names]
        assert adapters.would_answer(index, [prompt(name, 6) for name in names], answers)
    for ref in adapters.refs:
        engine.unload(ref.digest)
    assert engine.pool.free == PAGES
    assert engine.pager.host_count == 0
    engine.close()


class SlowStore(Executor):
    """In place of the reading threads: every read takes so many iterations."""

    def __init__(self, engine: Engine, steps: int) -> None:
        engine.pager._reader._threads.shutdown()
        engine.pager._reader._threads = self  # type: ignore[assignment]
        self._steps = steps
        self._now = 0
        self._due: list[tuple[int, Future[Slab], Callable[[], Slab]]] = []

    def submit(self, read: Callable[..., Slab], /, ref: AdapterRef) -> Future[Slab]:  # type: ignore[override]
        future: Future[Slab] = Future()
        self._due.append((self._now + self._steps, future, lambda: read(ref)))
        self._answer()
        return future

    def tick(self) -> None:
        self._now += 1
        self._answer()

    def _answer(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            _, future, read = self._due.pop(0)
            future.set_result(read())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def waiting_steps(world: World, adapters: Adapters, ahead: int) -> int:
    """Iterations with a free place and a request that waits for its adapter, when so many
    requests are known to the engine before it is their turn."""
    engine = world.engine(PAGES, running_max=4)
    store = SlowStore(engine, steps=3)
    driver = Driver(engine)
    todo = [
        Submit(str(index), prompt(index, 6), TOKENS, GREEDY, adapters.refs[index])
        for index in range(60)
    ]
    waited = 0
    while len(driver.ends) < 60:
        while todo and len(engine.scheduler.waiting) < ahead:
            driver.submit(todo.pop(0))
        store.tick()
        driver.step()
        waited += len(engine.scheduler.running) < 4 and bool(engine.scheduler.waiting)
    engine.close()
    return waited


def test_row_2d_reading_ahead_saves_seven_in_ten_of_the_steps_that_wait(
    world: World, adapters: Adapters
):
    assert waiting_steps(world, adapters, ahead=60) <= 0.3 * waiting_steps(world, adapters, ahead=1)


class CountingTeam:
    """In place of a decoder's team: counts the panels of the base model that were multiplied."""

    def __init__(self, team: Team, layers: int) -> None:
        self.threads = team.threads
        self._team = team
        self._stages = compiled_step.stages(layers)
        self.products: list[tuple[str, int, int]] = []
        """Of each: the stage, rows, and items of work but those of adapters."""

    def run(self, phases: int, function: Callable[..., None], *arguments: Any) -> Claims:
        claims = self._team.run(phases, function, *arguments)
        tokens: Tokens = arguments[2]
        units: Units = arguments[3]
        sampling: Units = arguments[4]
        for phase, stage in enumerate(self._stages):
            if stage in ("qkv", "o", "gate_up", "down", "head"):
                of_adapters = sampling if stage == "head" else units
                rows = len(tokens.last_S if stage == "head" else tokens.token_T)
                shrinks = -(-of_adapters.rank_max // RANKS) * len(of_adapters.start_U)
                self.products.append((stage, rows, int(claims[phase, DONE]) - shrinks))
        return claims


@pytest.mark.parametrize("count", [1, 4, 16])
def test_row_2e_the_base_model_is_multiplied_once_however_many_adapters(
    world: World, adapters: Adapters, count: int
):
    engine = world.engine(PAGES, running_max=16, step_tokens=256)
    driver = Driver(engine)
    for index in range(count):  # all at hand
        driver.submit(Submit(f"warm-{index}", [5], 1, GREEDY, adapters.refs[index]))
    driver.finish()
    decoder = engine._decoder
    assert isinstance(decoder, CompiledDecoder)
    counting = CountingTeam(decoder._team, 2)
    decoder._team = counting  # type: ignore[assignment]
    for index in range(16):
        ref = adapters.refs[index % count]
        driver.submit(Submit(str(index), prompt(index, 6), 2, GREEDY, ref))
    driver.step()
    assert engine.stats("").batch_adapters_max == count
    columns = {"qkv": 128, "o": 64, "gate_up": 256, "down": 64}
    layer = [(stage, 16 * 6, wide // PANEL) for stage, wide in columns.items()]
    assert counting.products == [*layer, *layer, ("head", 16, 256 // (HEAD_PANELS * PANEL))]
    driver.finish()
    engine.close()


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_m2_ten_thousand_loads_and_unloads_leave_nothing_behind(world: World, adapters: Adapters):
    """Each is another version; every fiftieth serves a request."""
    engine = world.engine(60, host_adapters_mib=1)
    SlowStore(engine, steps=0)
    driver = Driver(engine)
    slab_bytes = []

    def cycle(number: int) -> None:
        index = number % COUNT
        ref = AdapterRef(f"version-{number}", adapters.refs[index].folder)
        if number % 50 == 0:
            driver.submit(Submit(str(number), prompt(number, 6), TOKENS, GREEDY, ref))
            driver.finish()
            answer = driver.tokens.pop(str(number))
            assert adapters.would_answer(index, [prompt(number, 6)], [answer])
            del driver.ends[str(number)]
        else:
            engine.pager.want(ref)
            while not engine.pager.ready(ref):
                engine.pager.collect()
            supply = engine.scheduler._memory.supply
            supply.secure(engine.pager.pages_to_lease(ref.digest), "adapter")
            engine.pager.lease(ref.digest)
            engine.pager.unwant(ref.digest)
            engine.pager.release(ref.digest)
        slab_bytes.append(engine.pager._host_used)
        if number % 3:  # the others are pushed out
            engine.unload(ref.digest)

    for number in range(2_000):
        cycle(number)
    before = rss_bytes()
    for number in range(2_000, 10_000):
        cycle(number)
    grown = rss_bytes() - before
    assert grown < 2 * 2**20
    assert max(slab_bytes) <= 2**20 + 2**15  # and the newest one
    assert engine.pager.loads == 10_000
    for number in range(10_000):
        engine.unload(f"version-{number}")
    assert engine.pool.free == 60
    assert (engine.pager.host_count, engine.pager._host_used) == (0, 0)
    engine.close()
