"""Tokenizers of GGUF metadata that tests make up or change."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from gateway.engine.model import gguf_tokenizer
from gateway.engine.model.gguf_header import Metadata
from gateway.engine.tokenizer import Tokenizer

PROSE = (
    "The lamp was lit, and the old man told the story of the river again: how it rose in the night "
    "and took the lower field, how they carried the hens up the stairs.   Then    he laughed. "
)


def gguf_tokenizer_of(metadata: dict[str, Any], **changes: Any) -> tokenizers.Tokenizer:
    """What is built from metadata with some of `tokenizer.ggml` changed."""
    changed = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return gguf_tokenizer.build(Metadata(Path("m.gguf"), changed))


def built(metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    return Tokenizer(gguf_tokenizer_of(metadata, **changes))


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary trained on a little prose: pairs joined by frequency, scores by order."""
    words = ["▁" + word for word in (PROSE * 3).split(" ")]
    parts = [list(word) for word in words] + [list("▁" * 9), list("aaaaaaa")]
    joined: list[str] = []
    while True:
        counts = Counter(pair for part in parts for pair in pairwise(part))
        if max(counts.values()) < 3:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        joined.append("".join(best))
        for part in parts:
            at = 0
            while at < len(part) - 1:
                if (part[at], part[at + 1]) == best:
                    part[at : at + 2] = ["".join(best)]
                at += 1
    joined = list(dict.fromkeys(joined))
    letters = sorted(set("▁" + PROSE + "xyz") - {" "})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *joined, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


SENTENCEPIECE = sentencepiece_metadata()
