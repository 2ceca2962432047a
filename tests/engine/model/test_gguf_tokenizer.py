from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.model.errors import ModelError
from gateway.engine.model.gguf import GgufFile
from tests.engine.model.vocabularies import PROSE, SENTENCEPIECE, built
from tests.reference import DIGIT_TEXTS, HARD_TEXTS


@pytest.fixture(scope="module")
def metadata(base_model: Path) -> dict[str, Any]:
    with GgufFile.open(base_model) as file:
        return dict(file.metadata)


# --- bytes ---------------------------------------------------------------------------------------


def test_qwen2_cuts_and_normalizes_as_its_own_tokenizer(metadata: dict[str, Any]) -> None:
    from transformers import Qwen2Tokenizer

    tokens = metadata["tokenizer.ggml.tokens"]
    merges: Any = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    ours = built(metadata, pre="qwen2")
    for text in HARD_TEXTS + DIGIT_TEXTS:
        if "<|im" not in text and "<repo" not in text:  # which are not special to theirs
            assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "smaug-bpe", "gpt-2", "deepseek-r1-qwen"])
def test_other_cuts_are_those_of_transformers(
    pre: str, metadata: dict[str, Any], as_converted: Any
) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    steps = tokenizers.pre_tokenizers
    theirs = tokenizers.Tokenizer.from_str(as_converted.backend_tokenizer.to_str())
    theirs.pre_tokenizer = steps.ByteLevel(add_prefix_space=False)
    if pre != "gpt-2":
        split = steps.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
        level = steps.ByteLevel(add_prefix_space=False, use_regex=False)
        theirs.pre_tokenizer = steps.Sequence([split, level])
    ours = built(metadata, pre=pre)
    for text in HARD_TEXTS + DIGIT_TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_an_unknown_way_to_cut_is_refused(metadata: dict[str, Any]) -> None:
    for pre in ("default", "brand-new", ""):
        with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre"):
            built(metadata, pre=pre)


def test_begin_and_end_are_added_where_the_file_says_so(metadata: dict[str, Any]) -> None:
    assert built(metadata).encode("a") == [81]
    assert built(metadata, add_bos_token=True).encode("a") == [1, 81]
    assert built(metadata, add_bos_token=True, add_eos_token=True).encode("a") == [1, 81, 2]
    silent = {key: value for key, value in metadata.items() if not key.endswith("add_bos_token")}
    assert built(silent, pre="llama-bpe").encode("a") == [1, 81]
    assert built(silent).encode("a") == [81]


def test_a_user_defined_token_is_matched_whole_and_is_text(metadata: dict[str, Any]) -> None:
    kinds = metadata["tokenizer.ggml.token_type"].copy()
    kinds[3] = 4  # <repo_name>
    ours = built(metadata, token_type=kinds)
    assert ours.encode("<repo_name>") == [3]
    assert ours.decode([3]) == "<repo_name>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'; supported are gpt2 and llama"),
        ({"tokens": ["a", "a"]}, "same token twice"),
        ({"merges": ["a b c"]}, "not two tokens"),
        ({"merges": ["a \u2603"]}, "does not fit"),
        ({"token_type": np.array([1, 2])}, "unequal length"),
        ({"add_bos_token": True, "bos_token_id": 60000}, "60000"),
        ({"tokens": "text"}, "list of strings"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, metadata: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=message):
        built(metadata, **changes)


# --- SentencePiece ------------------------------------------------------------------------------


def sentencepiece_ids(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE as it is defined: join the best-scoring neighbours, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens) if i > 258}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        found = [
            (-scores[ids[left + right]], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in ids
        ]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out: list[int] = []
    for part in parts:
        out += [ids[part]] if part in ids else [byte + 3 for byte in part.encode()]
    return out


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="the rivatold. an,😀é\n", max_size=40))
def test_sentencepiece_text_is_joined_by_score(text: str) -> None:
    ours = built(SENTENCEPIECE)
    assert ours.encode(text) == [1, *sentencepiece_ids(text, SENTENCEPIECE)]
    assert ours.decode(ours.encode(text)) == text


def test_sentencepiece_runs_are_joined_by_score() -> None:
    ours = built(SENTENCEPIECE)
    for text in (PROSE, *(" " * n for n in range(20)), *("a" * n for n in range(1, 30))):
        assert ours.encode(text) == [1, *sentencepiece_ids(text, SENTENCEPIECE)]


def test_sentencepiece_without_a_space_before_the_text() -> None:
    ours = built(SENTENCEPIECE, add_space_prefix=False, add_bos_token=False)
    assert ours.decode(ours.encode(" the river")) == " the river"
    assert ours.encode("t") == [SENTENCEPIECE["tokenizer.ggml.tokens"].index("t")]


def test_sentencepiece_control_tokens_are_not_made_of_text() -> None:
    ours = built(SENTENCEPIECE)
    assert ours.encode("the</s>")[-1] == 2
    assert 2 not in ours.encode("the< /s>")


def test_sentencepiece_that_normalizes_is_refused() -> None:
    with pytest.raises(ModelError, match="normalizes text"):
        built(SENTENCEPIECE, remove_extra_whitespaces=True)
