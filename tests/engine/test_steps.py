"""What iterations hold, as the step log has it: budgets, decodes, cached prefixes, pages."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gateway.engine.messages import AdapterRef, Finished, Submit
from gateway.engine.steplog import StepRecord
from tests.engine.world import ADAPTERS, GREEDY, Driver, World, prompt

BUDGET = 32
BLOCK = 4


class Logged(Driver):
    """Keeps the log of its engine's steps, and the logits of each sampled token if `watched`."""

    def __init__(self, world: World, pages: int = 400, **options: Any) -> None:
        self.log: list[StepRecord] = []
        options = {"step_tokens": BUDGET} | options
        super().__init__(world.engine(pages, log=self.log.append, **options))
        self.logits: dict[str, list[Tensor]] = {}

    def watch(self) -> None:
        """Keep the logits by request: of its first token, its second, and so on."""
        engine = self.engine
        plan_, forward = engine.scheduler.plan, engine._decoder.forward
        sampling: list[str] = []

        def plan() -> Any:
            made = plan_()
            sampling[:] = [item.sequence.id for item in made.slices if item.samples]
            return made

        def watched(batch: Any) -> Tensor:
            logits_SV = forward(batch)
            for name, logits_V in zip(sampling, logits_SV, strict=True):
                self.logits.setdefault(name, []).append(logits_V.clone())
            return logits_SV

        engine.scheduler.plan = plan  # type: ignore[method-assign]
        engine._decoder = SimpleNamespace(forward=watched)  # type: ignore[assignment]

    def prefilled(self, name: str) -> int:
        return sum(
            share.prefilled
            for step in self.log
            for share in step.shares
            if share.request_id == name
        )

    def close(self) -> None:
        self.finish()
        self.engine.close()


def decoding(log: list[StepRecord], name: str) -> list[int]:
    """Iterations in which it got a token after its first."""
    return [
        step.iteration
        for step in log
        for share in step.shares
        if share.request_id == name and share.decoded
    ]


def test_row_3b_a_long_prompt_goes_in_chunks_beside_the_decodes(world: World):
    driver = Logged(world, context_tokens=512)
    for index in range(4):
        driver.submit(Submit(f"decode-{index}", prompt(index, 3), 60, GREEDY))
    driver.step()
    driver.submit(Submit("long", prompt(9, 400), 1, GREEDY, world.refs[1]))
    driver.finish()
    assert max(step.tokens for step in driver.log) <= BUDGET
    chunks = [
        step.iteration for step in driver.log for share in step.shares if share.request_id == "long"
    ]
    assert len(chunks) == -(-400 // (BUDGET - 4))
    for index in range(4):
        assert set(chunks) <= set(decoding(driver.log, f"decode-{index}"))
    driver.close()


def test_row_3c_without_chunks_one_step_holds_all_of_the_prompt(world: World):
    """The control: a budget as large as the prompt."""
    driver = Logged(world, step_tokens=512)
    driver.submit(Submit("long", prompt(9, 400), 1, GREEDY))
    driver.finish()
    assert [step.tokens for step in driver.log] == [400]
    driver.close()


def test_row_3a_chunks_of_any_size_give_the_same_logits(world: World):
    logits = []
    for budget in (8, 16, 64, 512):
        driver = Logged(world, step_tokens=budget)
        driver.watch()
        driver.submit(Submit("a", prompt(5, 100), 5, GREEDY, world.refs[2]))
        driver.finish()
        logits.append(torch.stack(driver.logits["a"]))
        driver.close()
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() <= 2e-4


def test_row_4_a_backlog_fills_every_step_exactly_and_shorter_ones_are_not_held_up(world: World):
    driver = Logged(world, pages=1_000, running_max=16)
    for index in range(60):
        length = 3 + index * 37 % 198
        driver.submit(Submit(str(index), prompt(index, length), 1, GREEDY, world.refs[index % 6]))
    while driver.engine.scheduler.waiting:
        driver.step()
    full = sum(step.tokens == BUDGET for step in driver.log)
    assert full >= 0.95 * len(driver.log)
    assert max(step.tokens for step in driver.log) == BUDGET
    driver.close()


@pytest.mark.parametrize("same_adapter", [True, False])
def test_row_11c_a_token_of_one_prompt_changes_nothing_of_another_in_the_batch(
    world: World, same_adapter: bool
):
    def logits_of_b(first: int) -> Tensor:
        driver = Logged(world, step_tokens=128)
        driver.watch()
        changed = prompt(1, 40)
        changed[20] = first
        other = world.refs[1] if same_adapter else world.refs[2]
        for index in (1, 2):  # both adapters are at hand
            driver.submit(Submit(f"warm-{index}", [5], 1, GREEDY, world.refs[index]))
        driver.finish()
        driver.log.clear()
        driver.submit(Submit("a", changed, 6, GREEDY, world.refs[1]))
        driver.submit(Submit("b", prompt(2, 30), 6, GREEDY, other))
        driver.finish()
        assert {share.request_id for share in driver.log[0].shares} == {"a", "b"}
        driver.close()
        changed_a.append(torch.stack(driver.logits["a"]))
        return torch.stack(driver.logits["b"])

    changed_a: list[Tensor] = []
    assert torch.equal(logits_of_b(10), logits_of_b(11))
    assert not torch.equal(changed_a[0], changed_a[1])


@pytest.mark.parametrize("index", [0, 3])
def test_row_1a_a_prompt_sent_twice_is_computed_once(world: World, index: int):
    driver = Logged(world)
    driver.watch()
    adapter = world.refs[index]
    for name in ("first", "second"):
        driver.submit(Submit(name, prompt(7, 300), 8, GREEDY, adapter, cache_namespace="tenant"))
        driver.finish()
    assert driver.prefilled("first") == 300
    assert 1 <= driver.prefilled("second") <= BLOCK + 1
    first, second = driver.ends["first"], driver.ends["second"]
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 300 - driver.prefilled("second")
    assert driver.tokens["second"] == driver.tokens["first"]
    assert world.would_answer(
        Submit("", prompt(7, 300), 8, GREEDY, adapter), driver.tokens["second"]
    )
    both = torch.stack(driver.logits["first"]), torch.stack(driver.logits["second"])
    assert (both[0] - both[1]).abs().max() <= 2e-4
    assert driver.engine.stats("").cached_tokens == second.cached_tokens
    driver.close()


def test_row_1b_only_the_same_tenant_with_the_same_adapter_hits(world: World):
    driver = Logged(world)
    roots: list[tuple[str | None, AdapterRef | None]] = [
        (tenant, adapter) for tenant in ("t1", "t2") for adapter in world.refs[:3]
    ]
    roots.append((None, None))
    for turn in range(2):
        for index, (tenant, adapter) in enumerate(roots):
            request = Submit(
                f"{turn}-{index}", prompt(3, 21), 3, GREEDY, adapter, cache_namespace=tenant
            )
            driver.submit(request)
            driver.finish()
            end = driver.ends[request.request_id]
            assert isinstance(end, Finished)
            assert end.cached_tokens == (20 if turn and tenant is not None else 0)
            assert world.would_answer(request, driver.tokens[request.request_id])
    driver.close()


def test_a_conversation_goes_on_from_what_was_said(world: World):
    """Each turn prefills what is new in it, the last answer's last tokens and a block at most."""
    driver = Logged(world)
    said = prompt(11, 50)
    for turn in range(4):
        name = f"turn-{turn}"
        request = Submit(name, list(said), 10, GREEDY, world.refs[1], cache_namespace="t")
        driver.submit(request)
        driver.finish()
        new = 50 if turn == 0 else 30
        assert driver.prefilled(name) <= new + BLOCK + 1
        assert world.would_answer(request, driver.tokens[name])
        said += driver.tokens[name] + prompt(turn, 30)
    driver.close()


def test_row_13d_a_pool_for_three_serves_eight_alike(world: World):
    """As an engine with pages for all, and the log says that some were sent back."""
    crowded = Logged(world, pages=24)
    for index in range(20):  # after these, the engine expects short answers
        crowded.submit(Submit(f"short-{index}", prompt(index, 6), 1, GREEDY))
    crowded.finish()
    roomy = Logged(world, pages=400)
    for driver in (crowded, roomy):
        for index in range(8):
            driver.submit(Submit(str(index), prompt(index, 6), 24, GREEDY))
        driver.finish()
    assert sum(step.preemptions for step in crowded.log) > 0
    assert sum(step.preemptions for step in roomy.log) == 0
    for index in range(8):
        assert crowded.tokens[str(index)] == roomy.tokens[str(index)]
    crowded.close()
    roomy.close()


def test_row_13e_a_sequence_wastes_less_than_a_block(world: World):
    """Once its prompt is in: until then it has the pages for all of the prompt."""
    driver = Logged(world)
    for index in range(6):
        driver.submit(Submit(str(index), prompt(index, 5 + 7 * index), 20, GREEDY))
    while driver.engine.scheduler.waiting or driver.engine.scheduler.running:
        driver.step()
        running = driver.engine.scheduler.running.values()
        for sequence in running:
            filled = max(sequence.computed, len(sequence.request.prompt))
            assert 0 <= len(sequence.pages) * BLOCK - filled < BLOCK
        assert driver.engine.pool.owned("kv") == sum(len(item.pages) for item in running)
    driver.close()


def test_row_23a_a_short_request_leaves_soon_after_it_came_whatever_runs(world: World):
    driver = Logged(world)
    driver.submit(Submit("long", prompt(1, 20), 64, GREEDY, world.refs[1]))
    for _ in range(3):
        driver.step()
    before = len(driver.log)
    driver.submit(Submit("short", prompt(2, 4), 4, GREEDY))
    while "short" not in driver.ends:
        driver.step()
    assert len(driver.log) - before <= 5
    assert "long" not in driver.ends
    driver.close()


def test_row_23b_thirty_requests_at_random_times_answer_as_alone(world: World):
    driver = Logged(world, running_max=8)
    generator = torch.Generator().manual_seed(23)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    requests = []
    for index in range(30):
        adapter = world.refs[draw(0, len(ADAPTERS))]
        requests.append(
            Submit(str(index), prompt(index, draw(1, 40)), draw(1, 16), GREEDY, adapter)
        )
        driver.submit(requests[-1])
        for _ in range(draw(0, 3)):
            driver.step()
    driver.finish()
    for request in requests:
        answer = driver.tokens[request.request_id]
        assert len(answer) == request.max_tokens
        assert world.would_answer(request, answer)
    assert max(len(step.shares) for step in driver.log) == 8
    driver.close()


def test_row_23c_a_cancelled_request_is_in_no_later_step_and_holds_no_page(world: World):
    driver = Logged(world)
    driver.submit(Submit("stays", prompt(1, 8), 30, GREEDY))
    driver.submit(Submit("goes", prompt(2, 40), 30, GREEDY, world.refs[1]))
    for _ in range(4):
        driver.step()
    driver.engine.scheduler.cancel("goes")
    before = len(driver.log)
    driver.step()
    assert [share.request_id for share in driver.log[-1].shares] == ["stays"]
    assert len(driver.log) == before + 1
    assert driver.log[-1].pages_kv == len(driver.engine.scheduler.running["stays"].pages)
    driver.close()


def test_the_log_accounts_for_every_token_and_every_load(world: World):
    driver = Logged(world, running_max=4)
    for index in range(12):
        driver.submit(Submit(str(index), prompt(index, 9), 5, GREEDY, world.refs[index % 7]))
    driver.finish()
    shares = [share for step in driver.log for share in step.shares]
    prefilled: Counter[str] = Counter()
    decoded: Counter[str] = Counter()
    for share in shares:
        prefilled[share.request_id] += share.prefilled
        decoded[share.request_id] += share.decoded
    assert set(prefilled.values()) == {9}
    assert set(decoded.values()) == {4}  # the first of five is sampled from the prompt
    stats = driver.engine.stats("")
    assert sum(step.adapter_loads for step in driver.log) == stats.adapter_loads == len(ADAPTERS)
    assert sum(step.bytes_loaded for step in driver.log) == driver.engine.pager.bytes_loaded
    assert [step.iteration for step in driver.log] == list(range(1, stats.iterations + 1))
    driver.close()
