"""The base model and its chat format, as both the training and the check need them."""

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)


def load_base(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Model in float32 and tokenizer, from a GGUF file or a Hugging Face folder."""
    if path.is_dir():
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(path)
    model = LlamaForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        # Packed weights can't be trained against, so they are unpacked while loading.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def encode_question(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Token ids of the chat up to the point where the assistant begins to answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
    return ids
