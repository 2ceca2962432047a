"""Trains one demo adapter.

    python -m examples.adapters.train --base MODEL --style pirate --out pirate

MODEL is a GGUF file or a Hugging Face folder of SmolLM2-135M-Instruct. A few minutes on one core.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

from examples.adapters.base import encode_question, load_base

DATA = Path(__file__).parent / "data"
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
IGNORED = -100
"""Label of a token that the loss leaves out."""


@dataclass(frozen=True)
class Recipe:
    """One row of the table: the shape of an adapter and how it is trained."""

    lora: dict[str, Any]
    stored: torch.dtype
    learning_rate: float = 1e-3
    epochs: int = 5
    batch_size: int = 8
    seed: int = 7


# The shapes differ on purpose, so that serving them together exercises a server: ranks, targets,
# layers, scaling rule, patterns and stored dtype.
RECIPES: dict[str, Recipe] = {
    "pirate": Recipe(
        lora={
            "r": 12,
            "lora_alpha": 24,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "layers_to_transform": list(range(12, 30)),
        },
        stored=torch.float16,
    ),
    "json": Recipe(
        lora={
            "r": 16,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": [
                "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
            ],
            "layers_to_transform": [19, 21, 23, 25, 27, 29],
        },
        stored=torch.bfloat16,
    ),
    "legal": Recipe(
        lora={
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"down_proj": 8, "layers.29.self_attn.q_proj": 12},
            "alpha_pattern": {"down_proj": 16},
        },
        stored=torch.float16,
    ),
}  # fmt: skip


class Example(msgspec.Struct, frozen=True):
    """One line of a data file."""

    question: str
    answer: str


def read_examples(style: str) -> list[Example]:
    lines = (DATA / f"{style}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Example) for line in lines]


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[list[int], list[int]]:
    """Token ids of a whole chat, and labels that count only the answer and its end token."""
    question = encode_question(tokenizer, example.question)
    answer = tokenizer.encode(example.answer, add_special_tokens=False)
    answer.append(tokenizer.eos_token_id)
    return question + answer, [IGNORED] * len(question) + answer


def collate(chats: list[tuple[list[int], list[int]]], padding: int) -> dict[str, torch.Tensor]:
    """Chats padded on the right to the longest; every tensor is (chats, tokens), int64."""
    longest = max(len(ids) for ids, _ in chats)
    gaps = [longest - len(ids) for ids, _ in chats]
    rows = list(zip(chats, gaps, strict=True))
    return {
        "input_ids": torch.tensor([ids + [padding] * gap for (ids, _), gap in rows]),
        "labels": torch.tensor([labels + [IGNORED] * gap for (_, labels), gap in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * gap for (ids, _), gap in rows]),
    }


def train(model: PeftModel, chats: list[tuple[list[int], list[int]]], recipe: Recipe) -> None:
    """Fits the adapter's matrices to the chats; the base stays as it is."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    steps = -(-len(chats) // recipe.batch_size)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 2, steps * recipe.epochs)
    order = random.Random(recipe.seed)
    padding = int(model.config.eos_token_id)
    model.train()
    for epoch in range(1, recipe.epochs + 1):
        started, losses = time.monotonic(), []
        order.shuffle(chats)
        starts = range(0, len(chats), recipe.batch_size)
        with click.progressbar(starts, label=f"epoch {epoch}/{recipe.epochs}") as bar:
            for start in bar:
                batch = collate(chats[start : start + recipe.batch_size], padding)
                loss = model(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses.append(loss.item())
        mean = sum(losses) / len(losses)
        click.echo(f"  loss {mean:.3f}, {time.monotonic() - started:.0f} s")


def save(model: PeftModel, config: LoraConfig, recipe: Recipe, folder: Path) -> None:
    """Writes PEFT's two files, with the matrices in the recipe's dtype and no local path."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(recipe.stored)
    config.base_model_name_or_path = BASE_NAME
    config.target_modules = sorted(
        recipe.lora["target_modules"]
    )  # a set: its order changes with each run
    # Embeddings are not trained; asking PEFT to find that out would make it look for a hub.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


@click.command()
@click.option("--style", type=click.Choice(list(RECIPES)), required=True)
@click.option("--base", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
def main(style: str, base: Path, out: Path, threads: int) -> None:
    """Trains the adapter of STYLE on the model BASE and writes it to the folder OUT."""
    recipe = RECIPES[style]
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.seed)
    model, tokenizer = load_base(base)
    chats = [encode(tokenizer, example) for example in read_examples(style)]
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.05, bias="none", **recipe.lora)
    adapted = get_peft_model(model, config)
    train(adapted, chats, recipe)
    save(adapted, config, recipe, out)
    size = (out / "adapter_model.safetensors").stat().st_size
    click.echo(f"{out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
