"""What a chat template writes whatever is said, such as its own system message: tokenized once.

    <|im_start|>│system↵You are …│<|im_end|>│↵│<|im_start|>│user↵Hi│<|im_end|>│↵│…
                └─── fixed ──────┘                         └encoded┘

A tokenizer cuts a text at its control tokens first, and what lies between two of them becomes
tokens by itself; so those of a part that is known need not be made again. Only the template's own
text is kept: how long a prompt takes must not tell of what other tenants write.
"""

import re
from collections.abc import Callable, Iterable

import tokenizers

Encode = Callable[[str], list[int]]


class FixedText:
    def __init__(self, backend: tokenizers.Tokenizer, encode: Encode) -> None:
        """`encode`: of a text that stands by itself, without the ends that a model may want."""
        added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        self._encode = encode
        self._tokens = {content: [i] for content, i in added.items()}
        # Longest first: a token wins over those that it begins with.
        contents = sorted(filter(None, added), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, contents)) or '(?!)'})")
        self._fixed: dict[str, list[int]] = {}

    @staticmethod
    def is_sound_for(backend: tokenizers.Tokenizer) -> bool:
        """Whether its added tokens are found in the text as it is, and take nothing around them."""
        return not any(
            token.normalized or token.single_word or token.lstrip or token.rstrip
            for token in backend.get_added_tokens_decoder().values()
        )

    def learn(self, rendered: Iterable[str]) -> None:
        """From prompts of different messages: what all of them have is the template's."""
        parts = [set(self._cut.split(text)) for text in rendered]
        common = set.intersection(*parts) - self._tokens.keys() - {""}
        self._fixed = {part: self._encode(part) for part in common}

    def encode(self, rendered: str) -> list[int]:
        """The same tokens as of the whole at once."""
        if not self._fixed:
            return self._encode(rendered)
        ids: list[int] = []
        for part in self._cut.split(rendered):
            if part:
                known = self._tokens.get(part) or self._fixed.get(part)
                ids += self._encode(part) if known is None else known
        return ids
