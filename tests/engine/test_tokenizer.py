from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.model.errors import ModelError
from gateway.engine.tokenizer import TextStream, Tokenizer
from tests.engine.model.vocabularies import SENTENCEPIECE, built
from tests.reference import DIGIT_TEXTS, HARD_TEXTS


@pytest.fixture(scope="module")
def streamed(ours: Tokenizer) -> list[Tokenizer]:
    """Every way to decode."""
    return [ours, built(SENTENCEPIECE), built(SENTENCEPIECE, add_space_prefix=False)]


# --- encoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_text_has_the_tokens_of_transformers(
    text: str, ours: Tokenizer, as_converted: Any
) -> None:
    assert ours.encode(text) == as_converted.encode(text)


@pytest.mark.parametrize("text", DIGIT_TEXTS)
def test_digits_are_cut_one_by_one_before_the_rest(text: str, ours: Tokenizer, theirs: Any) -> None:
    assert ours.encode(text) == theirs.encode(text)


def test_blanks_before_a_digit_stay_together(ours: Tokenizer) -> None:
    assert ours.encode("a  12\n\n1") == [81, 256, 33, 34, 1116, 33]


def test_the_reference_folder_gives_the_same_tokens(
    ours: Tokenizer, reference_folder: Path
) -> None:
    folder = Tokenizer.load(reference_folder)
    for text in HARD_TEXTS + DIGIT_TEXTS:
        assert folder.encode(text) == ours.encode(text)
    assert folder.vocab_size == ours.vocab_size == 49152
    assert folder.eos_token_ids == ours.eos_token_ids == [2]
    messages = [{"role": "user", "content": "Hi"}]
    assert folder.encode_chat(messages) == ours.encode_chat(messages)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_tokens_of_transformers(text: str, ours: Tokenizer, theirs: Any) -> None:
    assert ours.encode(text) == theirs.encode(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab \n\t1234'.<|im_end>\u0301é", max_size=40))
def test_any_mix_of_traps_has_the_tokens_of_transformers(
    text: str, ours: Tokenizer, theirs: Any
) -> None:
    assert ours.encode(text) == theirs.encode(text)


def test_half_a_surrogate_pair_is_encoded_as_the_replacement(ours: Tokenizer) -> None:
    assert ours.encode("a\ud83db") == ours.encode("a\ufffdb")
    assert ours.encode("\ud83d\ude00") == ours.encode("😀")


# --- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD_TEXTS + DIGIT_TEXTS)
def test_text_survives_encoding_and_decoding(text: str, ours: Tokenizer, theirs: Any) -> None:
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    if "<|" not in text and "<repo" not in text:
        assert ours.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_any_tokens_decode_as_in_transformers(ids: list[int], ours: Tokenizer, theirs: Any) -> None:
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_ids_outside_the_vocabulary_have_no_text(ours: Tokenizer) -> None:
    assert ours.decode([81, 60000, -1, 81]) == "aa"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_stream_says_what_decoding_says(data: st.DataObject, streamed: list[Tokenizer]) -> None:
    tokenizer = data.draw(st.sampled_from(streamed))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    stream = TextStream(tokenizer)
    pieces = [stream.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_stream_never_shows_half_a_character(text: str, ours: Tokenizer) -> None:
    stream = TextStream(ours)
    pieces = [stream.push([i]) for i in ours.encode(text)]
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert stream.flush() == ""


def test_a_stream_shows_a_character_with_its_last_byte(ours: Tokenizer) -> None:
    ids = ours.encode("😀")
    assert len(ids) > 1
    stream = TextStream(ours)
    assert [stream.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["😀"]


def test_a_cut_character_comes_out_as_a_replacement_at_the_end(ours: Tokenizer) -> None:
    stream = TextStream(ours)
    assert stream.push(ours.encode("ok 😀")[:-1]) == "ok "
    assert stream.flush() == "\ufffd"


# --- folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_is_not_understood_is_refused() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder WordPiece"):
        Tokenizer(backend)


def test_truncation_and_padding_of_a_file_are_not_applied(theirs: Any) -> None:
    backend = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    text = "one two three four five six seven"
    assert Tokenizer(backend).encode(text) == theirs.encode(text)
    assert Tokenizer(backend).encode("a") == [81]


def test_an_answer_ends_at_the_tokens_of_the_model_and_of_the_tokenizer(
    reference_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(reference_folder / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox", "eos_token_id": 0}')
    assert Tokenizer.load(tmp_path).eos_token_ids == [0]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Tokenizer.load(tmp_path).eos_token_ids == [0, 2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert Tokenizer.load(tmp_path).eos_token_ids == [5, 2]
