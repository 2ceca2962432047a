"""A whole engine that decodes from fixed tables, under Triton's interpreter, answers as PEFT does.

Not collected with the other tests, see `interpreted.py`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.kernels.interpreter import use_interpreter

use_interpreter()

from gateway.engine import options  # noqa: E402
from gateway.engine.kernels import gpu  # noqa: E402
from gateway.engine.kernels.gpu_fixed import FixedTables  # noqa: E402
from gateway.engine.kernels.gpu_graphs import Run  # noqa: E402
from gateway.engine.messages import Sampling, Submit, Tokens  # noqa: E402
from gateway.engine.model.decoder import Decoder  # noqa: E402
from gateway.engine.model.graphs import DecodeGraphs  # noqa: E402
from tests.engine.world import World  # noqa: E402

# rows of padding compute with whatever they find
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PROMPTS = [[3, 14, 15], [9, 2], [6, 5, 3, 5], [8, 9]]
NEW_TOKENS = 3


def test_an_engine_with_graphs_answers_as_peft_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world = World(tmp_path)
    monkeypatch.setattr(options, "compiled", lambda *_: False)
    engine = world.engine(running_max=4, cuda_graphs=True)
    assert isinstance(engine._decoder, Decoder)
    decoder = engine._decoder = replace(engine._decoder, kernels=gpu)
    tables = FixedTables(decoder.buffer.pages_NP, 4, world.info.targets, 4, 64)
    replays = 0

    def record(run: Run) -> Run:
        def replay() -> torch.Tensor:
            nonlocal replays
            replays += 1
            return run()

        run()
        return replay

    with torch.inference_mode():
        engine._graphs = DecodeGraphs(decoder, tables, 4)
        engine._graphs.record(record)
    refs = [world.refs[index] for index in (0, 6, 2, 6)]  # of which 6 has embeddings
    for index, (prompt, ref) in enumerate(zip(PROMPTS, refs, strict=True)):
        greedy = Sampling(temperature=0)
        engine.submit(Submit(str(index), prompt, NEW_TOKENS - index % 2, greedy, ref))
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
    while engine.scheduler.running or engine.scheduler.waiting:
        for event in engine.step():
            if isinstance(event, Tokens):
                answers[event.request_id] += event.ids
    engine.close()
    assert replays >= NEW_TOKENS - 1
    for (key, answer), prompt, ref in zip(answers.items(), PROMPTS, refs, strict=True):
        assert answer == world.answer(ref, prompt, NEW_TOKENS - int(key) % 2)
