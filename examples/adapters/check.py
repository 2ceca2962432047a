"""Asks the base and each adapter the held-out questions, and counts the answers in style.

    python -m examples.adapters.check --base MODEL

Greedy decoding through the chat template in float32. Exit status 1 where an adapter answers out of
style more than once in eight questions, or the base answers in a style by itself.
"""

import sys
from pathlib import Path

import click
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from examples.adapters.base import encode_question, load_base
from examples.adapters.styles import STYLES, shows_style

HERE = Path(__file__).parent
NEW_TOKENS_MAX = 64


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    ids = torch.tensor([encode_question(tokenizer, question)])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS_MAX,
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


@click.command()
@click.option("--base", type=click.Path(exists=True, path_type=Path), required=True)
@click.option(
    "--adapters",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=HERE,
    help="Folder that holds one folder per style.",
)
@click.option("--style", "styles", multiple=True, type=click.Choice(STYLES), default=STYLES)
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
def main(base: Path, adapters: Path, styles: tuple[str, ...], threads: int) -> None:
    """Counts the answers in style of the model BASE and of its adapters."""
    torch.set_num_threads(threads)
    questions = (HERE / "data" / "held_out.txt").read_text("utf-8").splitlines()
    model, tokenizer = load_base(base)
    plain = [answer(model, tokenizer, question) for question in questions]
    for question, text in zip(questions, plain, strict=True):
        click.echo(f"base    {question}  ->  {text!r}")
    rows = []
    for style in styles:
        # PEFT puts the adapter's layers into `model` itself, and takes them out again.
        adapted = PeftModel.from_pretrained(model, str(adapters / style))
        styled = [answer(model, tokenizer, question) for question in questions]
        adapted.unload()
        for question, text in zip(questions, styled, strict=True):
            mark = " " if shows_style(style, text) else "!"
            click.echo(f"{style:7}{mark}{question}  ->  {text!r}")
        rows.append((style, _count(style, plain), _count(style, styled)))
    click.echo(f"\nin style, of {len(questions)}:   base   adapter")
    for style, by_base, by_adapter in rows:
        click.echo(f"{style:18} {by_base:6} {by_adapter:9}")
    if any(by_base or by_adapter < len(questions) * 7 / 8 for _, by_base, by_adapter in rows):
        sys.exit(1)


def _count(style: str, answers: list[str]) -> int:
    return sum(shows_style(style, text) for text in answers)


if __name__ == "__main__":
    main()
