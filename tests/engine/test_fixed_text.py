"""A prompt in parts has the tokens of the prompt as a whole."""

from functools import partial
from typing import Any

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.fixed_text import FixedText
from gateway.engine.tokenizer import Tokenizer, _encode

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.text(max_size=30)
            | st.text(alphabet="ab \n\t1234'.<|im_end>\u0301é", max_size=30)
            | st.sampled_from(["", "assistant\n", "\n", "system\n", " user", "<|im_start|>"]),
        }
    ),
    min_size=1,
    max_size=4,
)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return _encode(tokenizer._backend, text, ends=False)


@settings(max_examples=400, deadline=None)
@given(messages=MESSAGES)
def test_any_conversation_has_the_tokens_of_its_text_as_a_whole(
    messages: list[dict[str, str]], ours: Tokenizer
) -> None:
    ours.warm_up()
    assert ours._template is not None
    text = ours._template.render(messages)
    fixed = FixedText(ours._backend, partial(_encode, ours._backend, ends=False))
    fixed.learn(ours._template.render([{"role": "user", "content": each}]) for each in "ab")
    assert fixed.encode(text) == whole(ours, text)


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>", "a", " ", "\n"]
        )
        | st.text(max_size=5)
    )
)
def test_so_has_any_mix_of_control_tokens_and_text(parts: list[str], ours: Tokenizer) -> None:
    text = "".join(parts)
    fixed = FixedText(ours._backend, partial(_encode, ours._backend, ends=False))
    fixed.learn([text, text])
    assert fixed.encode(text) == whole(ours, text)


def test_only_what_all_prompts_have_is_kept(ours: Tokenizer) -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return whole(ours, text)

    fixed = FixedText(ours._backend, encode)
    fixed.learn(["<|im_start|>said always<|im_end|>one", "<|im_start|>said always<|im_end|>two"])
    encoded.clear()
    fixed.encode("<|im_start|>said always<|im_end|>one<|im_end|>three")
    fixed.encode("<|im_start|>three")
    assert encoded == ["one", "three", "three"]


def test_a_tokenizer_whose_tokens_take_blanks_around_them_is_left_alone(theirs: Any) -> None:
    backend = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    assert FixedText.is_sound_for(backend)
    backend.add_special_tokens([tokenizers.AddedToken("<x>", lstrip=True, special=True)])
    assert not FixedText.is_sound_for(backend)
