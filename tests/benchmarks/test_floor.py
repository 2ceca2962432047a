from types import SimpleNamespace

from benchmarks import floor
from benchmarks.floor import Cost, Load, Machine, Use
from gateway.engine.messages import ModelInfo
from gateway.engine.scheduling.plan import Slice

INFO = ModelInfo(
    digest="",
    name="tiny",
    model_path="",
    architecture="llama",
    layers=2,
    hidden_size=8,
    vocab_size=100,
    context_tokens=64,
    eos_token_ids=[],
    projections={
        "q_proj": (8, 8),
        "k_proj": (4, 8),
        "v_proj": (4, 8),
        "o_proj": (8, 8),
        "gate_proj": (16, 8),
        "up_proj": (16, 8),
        "down_proj": (8, 16),
    },
    embeddings_sha256={},
    dtype="bfloat16",
    device="cpu",
)
WEIGHTS_OF_LAYER = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 16 * 8
LORA_OF_LAYER = sum(rows + columns for rows, columns in INFO.projections.values())
"""Elements of an adapter of rank 1."""
KV_OF_TOKEN = 2 * 2 * 4


def test_a_step_reads_each_weight_and_the_kv_once():
    cost = floor.step(INFO, floor.decoding(sequences=3, context=10))
    assert cost.bytes == 2 * (2 * WEIGHTS_OF_LAYER + 100 * 8 + 30 * KV_OF_TOKEN)


def test_an_adapter_is_read_once_and_computed_for_each_of_its_tokens():
    base = floor.step(INFO, Load(5, 5, 0, 0))
    cost = floor.step(INFO, Load(5, 5, 0, 0, [Use(rank=3, tokens=4), Use(rank=1, tokens=1)]))
    assert cost.bytes - base.bytes == 2 * 2 * (3 + 1) * LORA_OF_LAYER
    assert cost.flops - base.flops == 2 * 2 * (3 * 4 + 1) * LORA_OF_LAYER


def test_only_the_tokens_that_sample_meet_the_output_embeddings():
    many = floor.stages(INFO, Load(tokens=7, samples=2, keys=0, pairs=0))
    assert many["head"].flops == 2 * 100 * 8 * 2
    assert many["o"].flops == 2 * (2 * 8 * 8) * 7


def test_adapters_go_round_the_sequences():
    assert floor.decoding(5, 1, ranks=[8, 16]).uses == [Use(8, 3), Use(16, 2)]
    assert floor.decoding(1, 1, ranks=[8, 16]).uses == [Use(8, 1)]


def test_what_takes_longer_is_the_floor():
    machine = Machine(bandwidth=10, rate=100)
    assert Cost(bytes=20, flops=100).seconds(machine) == 2
    assert Cost(bytes=20, flops=300).seconds(machine) == 3


def test_a_chunk_of_a_prompt_attends_to_what_came_before_and_to_itself():
    adapter = SimpleNamespace(layout=SimpleNamespace(groups={(0, "o"): SimpleNamespace(rank=4)}))
    chunk = SimpleNamespace(computed=10, pending=5, digest="a", adapter=adapter)
    decode = SimpleNamespace(computed=5, pending=1, digest=None, adapter=None)
    load = floor.planned([Slice(decode, 1), Slice(chunk, 3)])  # type: ignore[arg-type]  # stands in
    assert load == Load(tokens=4, samples=1, keys=6 + 13, pairs=6 + 11 + 12 + 13, uses=[Use(4, 3)])
    assert not load.decodes
