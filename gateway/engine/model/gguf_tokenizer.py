"""A tokenizer from the metadata of a GGUF file. Needs no torch.

GGUF holds the vocabulary and merges, but how text is cut before merging only as a name
(`tokenizer.ggml.pre`). The wrong cut gives wrong tokens without any error, so a name that is not
known is refused.
"""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from gateway.engine.model.errors import ModelError
from gateway.engine.model.gguf_header import Metadata

PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # token types

# How the vocabularies of GPT-4, and those modelled on it, cut text.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDING}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDING}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES = {
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_GPT2 = ("gpt-2",)
# These take every digit for itself first, and cut the rest as GPT-2 does: blanks before a digit
# stay together, whereas GPT-2's expression would give the last one to the number.
_DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""A piece that is in the vocabulary is a token, whatever the merges say; they also begin with BOS
unless the file says otherwise."""


def build(metadata: Metadata) -> Tokenizer:
    """Raises ModelError, also for a kind of tokenizer that is not supported."""
    kind = metadata.text(PREFIX + "model")
    tokens = metadata.texts(PREFIX + "tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{metadata.path} has the same token twice in its vocabulary.")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(metadata, tokens)
        elif kind == "llama":
            tokenizer = _sentencepiece(metadata, tokens)
        else:
            raise ModelError(
                f"{metadata.path} has a tokenizer of kind {kind!r}; supported are gpt2 and llama."
            )
        _add_tokens(tokenizer, metadata, tokens)
        _add_ends(tokenizer, metadata, tokens, kind)
    except ModelError:
        raise
    # The tokenizers package raises bare exceptions for parts that do not fit together.
    except Exception as error:
        raise ModelError(f"The tokenizer in {metadata.path} does not fit: {error}.") from error
    return tokenizer


def _byte_level(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """BPE over bytes that are spelled as letters (GPT-2)."""
    pre = metadata.text(PREFIX + "pre", "")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    merges = [tuple(merge.split(" ")) for merge in metadata.texts(PREFIX + "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError(f"{metadata.path} has a merge that is not two tokens.")
    tokenizer = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(merge[0], merge[1]) for merge in merges],
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if pre in _GPT2:
        tokenizer.pre_tokenizer = gpt2
    elif pre in _DIGITS_THEN_GPT2:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    elif pre in _REGEXES:
        split = pre_tokenizers.Split(Regex(_REGEXES[pre]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    else:
        known = ", ".join(sorted([*_GPT2, *_DIGITS_THEN_GPT2, *_REGEXES]))
        raise ModelError(
            f"{metadata.path} names the pre-tokenizer {pre!r} (tokenizer.ggml.pre), and cutting "
            f"text in another way would give wrong tokens; supported are {known}."
        )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE, where a vocabulary with scores implies the merges (Llama 2)."""
    if PREFIX + "precompiled_charsmap" in metadata or metadata.flag(
        PREFIX + "remove_extra_whitespaces", False
    ):
        raise ModelError(f"{metadata.path} normalizes text in a way that is not supported.")
    scores = metadata.numbers(PREFIX + "scores")
    kinds = metadata.integers(PREFIX + "token_type")
    if not len(tokens) == len(scores) == len(kinds):
        raise ModelError(
            f"{metadata.path} has lists of tokens, scores and types of unequal length."
        )
    unknown = metadata.integer(PREFIX + "unknown_token_id", 0)
    tokenizer = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_implied_merges(tokens, scores, kinds),
            unk_token=_token_text(metadata, tokens, unknown),
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    stripping: list[decoders.Decoder] = []
    if metadata.flag(PREFIX + "add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        stripping = [decoders.Strip(content=" ", left=1, right=0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripping]
    )
    return tokenizer


def _implied_merges(
    tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score of the result first.

    SentencePiece joins the two neighbours whose joint token scores best; ranks by score say the
    same. Control and byte tokens are not made of text.
    """
    apart = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] not in apart}
    found = [
        (-scores[i], i, cut, token[:cut], token[cut:])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are matched whole, but are text."""
    if PREFIX + "token_type" not in metadata:
        return
    kinds = metadata.integers(PREFIX + "token_type")
    if len(kinds) != len(tokens):
        raise ModelError(f"{metadata.path} has lists of tokens and types of unequal length.")
    for kind, add in (
        (_CONTROL, tokenizer.add_special_tokens),
        (_USER_DEFINED, tokenizer.add_tokens),
    ):
        add(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, its_kind in zip(tokens, kinds, strict=True)
                if its_kind == kind and token
            ]
        )


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str], kind: str) -> None:
    """Begin with BOS and end with EOS, where the file says so."""
    begins = kind == "llama" or metadata.text(PREFIX + "pre", "") in _WHOLE_WORDS_FIRST
    ends: list[str | None] = []
    for name, default in (("bos", begins), ("eos", False)):
        wanted = metadata.flag(f"{PREFIX}add_{name}_token", default)
        key = f"{PREFIX}{name}_token_id"
        ends.append(
            _token_text(metadata, tokens, metadata.integer(key))
            if wanted and key in metadata
            else None
        )
    bos, eos = ends
    if bos is None and eos is None:
        return
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(text, tokens.index(text)) for text in dict.fromkeys(ends) if text]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )


def named_tokens(metadata: Metadata) -> dict[str, str]:
    """`bos_token`, `eos_token`, … → text, as a chat template wants them."""
    tokens = metadata.texts(PREFIX + "tokens")
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return {
        f"{short}_token": _token_text(metadata, tokens, metadata.integer(key))
        for name, short in names.items()
        if (key := f"{PREFIX}{name}_token_id") in metadata
    }


def _token_text(metadata: Metadata, tokens: list[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"{metadata.path} names the token {token_id}, which it does not have.")
    return tokens[token_id]
