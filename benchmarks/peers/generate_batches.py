"""Answers batches with transformers + PEFT: a line of JSON in, a line of JSON out.

    python generate_batches.py --model FOLDER --dtype bfloat16 ADAPTER …

    {"prompts": [[1, 2], [3, 4]], "adapters": ["adapter-000", "adapter-001"], "tokens": 2}
    {"ids": [[5, 6], [7, 8]]}

It is run by the Python that has transformers and PEFT, so it imports nothing of this project.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("adapters", type=Path, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = load(options.model, getattr(torch, options.dtype), options.adapters)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = generate(model, request["prompts"], request["adapters"], request["tokens"])
        print(json.dumps({"ids": ids}), flush=True)


def load(folder: str, dtype: torch.dtype, adapters: list[Path]) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    base.generation_config.eos_token_id = None
    first, *rest = adapters
    # low_cpu_mem_usage: else each adapter is first filled with random numbers, which takes seconds
    model: Any = PeftModel.from_pretrained(base, first, first.name, low_cpu_mem_usage=True)
    for adapter in rest:
        model.load_adapter(adapter, adapter.name, low_cpu_mem_usage=True)
    return model.to(dtype).eval()  # PEFT keeps adapters in float32 by itself


def generate(
    model: Any, prompts: list[list[int]], adapters: list[str], tokens: int
) -> list[list[int]]:
    batch = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            input_ids=batch,
            attention_mask=torch.ones_like(batch),
            adapter_names=adapters,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
    answers: list[list[int]] = out[:, batch.shape[1] :].tolist()
    return answers


main()
