"""Text to token ids and back, as the base model was trained. Needs no torch.

Encoding is the `tokenizers` package's, from a folder's tokenizer.json or from a GGUF's metadata.
Decoding joins the bytes of tokens, which lets a stream go on where it stopped.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from gateway.engine.chat_template import ChatTemplate, ChatTemplateError
from gateway.engine.control_tokens import ControlTokens, split, unused_mark
from gateway.engine.fixed_text import FixedText
from gateway.engine.model import gguf_tokenizer
from gateway.engine.model.errors import ModelError
from gateway.engine.model.folder_config import Fields, end_tokens, read_json
from gateway.engine.model.gguf import GgufFile
from gateway.engine.model.gguf_config import end_tokens as gguf_end_tokens
from gateway.engine.token_bytes import TokenBytes

__all__ = ["ChatTemplateError", "TextStream", "Tokenizer"]

TOKENIZER_BYTES_MAX = 1 << 28
PROBES = ("a", "b c")
"""Messages without anything in common."""


class Tokenizer:
    """Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Sequence[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.eos_token_ids = list(dict.fromkeys(eos_token_ids))
        """Ids that end an answer."""
        self.token_bytes = TokenBytes.read(backend)
        self._backend = backend
        self._template = template
        added = backend.get_added_tokens_decoder().values()
        self.token_bytes_max = max(
            (len(text) for text in (*self.token_bytes.of, *(t.content.encode() for t in added))),
            default=0,
        )
        """UTF-8 bytes of the longest text that becomes one token, special ones included."""
        special = {token.content for token in added if token.special}
        # A template may give a part to tokens that are not special. What an assistant said is
        # returned to it as it was (`<think>` is such a token); nobody else may write them.
        source = template.source if template else ""
        structural = special | {token.content for token in added if token.content in source}
        self._control_in_answers = ControlTokens(special)
        self._control = ControlTokens(structural)
        self._control_ids = {backend.token_to_id(content) for content in structural}
        self._prompt: Callable[[str], list[int]] = partial(_encode, backend, ends=False)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a Hugging Face folder or a GGUF file. Raises ModelError."""
        return _from_folder(path) if path.is_dir() else _from_gguf(path)

    def warm_up(self) -> None:
        """Do once what else the first conversation would wait for."""
        _ = self._text_backend
        with suppress(ChatTemplateError):  # a template may refuse anything
            self.encode_chat([{"role": "user", "content": "…"}])
            self._learn_fixed_text()

    def _learn_fixed_text(self) -> None:
        """Raises ChatTemplateError."""
        # what SentencePiece does to the first part of a text it does not do to the others
        if (
            self._template
            and FixedText.is_sound_for(self._backend)
            and not (self.token_bytes.first_space_drops)
        ):
            fixed = FixedText(self._backend, self._prompt)
            fixed.learn(
                self._template.render([{"role": "user", "content": content}]) for content in PROBES
            )
            self._prompt = fixed.encode

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; the model's output may be wider."""
        return len(self.token_bytes.of)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt: texts of special tokens become those, and the model's own ends (a
        BOS, for instance) are added."""
        return _encode(self._backend, text, ends=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins.

        Control tokens come from the template only: written in a message, they are plain text.
        Raises ChatTemplateError if the model has no template or it refuses the messages.
        """
        if self._template is None:
            raise ChatTemplateError("The base model has no chat template; use /v1/completions.")
        if not any(self._control.within(text) for each in messages for text in each.values()):
            return self._prompt(self._template.render(messages))
        mark = unused_mark(messages, self._template.source)
        if mark is None:
            raise ChatTemplateError("The messages use every private character of Unicode.")
        marked = []
        for message in messages:
            answer = message.get("role") == "assistant"
            control = self._control_in_answers if answer else self._control
            marked.append({name: control.mark(text, mark) for name, text in message.items()})
        ids: list[int] = []
        for piece in split(self._template.render(marked), mark):
            if piece.plain:
                ids += self._plain(piece.text)
            elif ids:
                ids += self._after(self._backend, piece.text)
            else:
                ids += _encode(self._backend, piece.text, ends=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones; bytes that are not UTF-8 become U+FFFD."""
        raw = self.token_bytes.join(list(ids))
        if self.token_bytes.first_space_drops:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def _plain(self, text: str) -> list[int]:
        """Ids of text in which no token is a control token."""
        ids = self._after(self._text_backend, text)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The vocabulary itself builds the token out of text: its characters, one by one.
        ids = [i for letter in text for i in self._after(self._text_backend, letter)]
        return [i for i in ids if i not in self._control_ids]

    def _after(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Without the space that SentencePiece would put before the text if it stood alone."""
        if self.token_bytes.first_space_drops:
            newline = _encode(backend, "\n", ends=False)
            ids = _encode(backend, "\n" + text, ends=False)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return _encode(backend, text, ends=False)

    @cached_property
    def _text_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its added tokens: everything is text to it."""
        parts = msgspec.json.decode(self._backend.to_str())
        parts["added_tokens"] = []
        parts["post_processor"] = None
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(parts).decode())


class TextStream:
    """Text out of tokens that arrive a few at a time.

    All that is returned together equals `decode` of all tokens, however they were cut. A character
    whose bytes are not all there is kept back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = tokenizer.token_bytes.first_space_drops

    def push(self, ids: Sequence[int]) -> str:
        """The text that is sure now and was not before."""
        raw = self._token_bytes.join(list(ids))
        if self._drop_space and raw:
            raw = raw.removeprefix(b" ")
            self._drop_space = False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What was kept back, at the end: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def _encode(backend: tokenizers.Tokenizer, text: str, *, ends: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair: JSON can write it, UTF-8 cannot.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    # "fast": without the tokens' places in the text, which nobody asks for
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=ends)
    return list(encoding.ids)


# --- reading ------------------------------------------------------------------------------------


def _from_gguf(path: Path) -> Tokenizer:
    with GgufFile.open(path) as file:
        metadata = file.metadata
    source = metadata.text("tokenizer.chat_template", "")
    named = gguf_tokenizer.named_tokens(metadata)
    return Tokenizer(
        gguf_tokenizer.build(metadata),
        eos_token_ids=gguf_end_tokens(metadata),
        template=ChatTemplate(source, named) if source else None,
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        if path.stat().st_size > TOKENIZER_BYTES_MAX:
            raise ModelError(f"{path} is larger than {TOKENIZER_BYTES_MAX} bytes.")
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # the package raises it bare
        raise ModelError(f"{path} is not a tokenizer: {error}.") from error
    settings = _optional_json(folder / "tokenizer_config.json")
    named = _named_tokens(settings | _optional_json(folder / "special_tokens_map.json"))
    ends = end_tokens(folder, Fields(folder, _optional_json(folder / "config.json")))
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    source = _chat_template(folder, settings)
    return Tokenizer(
        backend,
        eos_token_ids=[*ends, *([] if eos is None else [eos])],
        template=ChatTemplate(source, named) if source else None,
    )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """From its own file, or from tokenizer_config.json: a text, or a list with one of the name
    `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}.") from error
    source = _optional_json(folder / "chat_template.json").get("chat_template")
    source = settings.get("chat_template") if source is None else source
    if isinstance(source, list):
        named = {
            item.get("name"): item.get("template") for item in source if isinstance(item, dict)
        }
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise ModelError(f"{folder} has a chat template that is not a text.")
    return source


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … → text; each is a text or an object with its `content`."""
    named = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
