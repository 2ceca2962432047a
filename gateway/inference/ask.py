"""What a client asks for, checked as far as it can be without knowing the model."""

from msgspec import Struct

from gateway.engine.messages import Sampling
from gateway.tenants.keys import Principal

OPENING_CHARACTERS = 256
"""Of a text: its beginning, by which it is known again when it has grown."""
OPENING_TOKENS = 64


class Conversation(Struct, frozen=True):
    messages: list[dict[str, str]]
    """Each with `role` and `content`."""


Prompt = str | list[int] | Conversation
"""A text, its tokens, or a conversation."""


class Ask(Struct, frozen=True):
    """A request that was checked as far as it can be without knowing the model."""

    model: str
    prompt: Prompt
    prompt_param: str
    """What the client calls the prompt: `messages` or `prompt`."""
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    """Whether the model's end-of-sequence tokens are tokens like any other."""
    max_tokens: int | None
    max_tokens_default: int | None
    """Where the client leaves it open; None: as many as the context has left."""
    id_prefix: str
    user: str | None = None
    """Whom it is for, as the client calls them."""

    @property
    def characters(self) -> int:
        """Of its texts; a list of tokens has none."""
        match self.prompt:
            case Conversation(messages):
                return sum(len(message["content"]) for message in messages)
            case str(text):
                return len(text)
            case _:
                return 0


def client_of(ask: Ask, principal: Principal) -> str:
    """Who gets the same version again where two share the requests: the user that the request
    names, else the key in this conversation, by its beginning, which stays while it grows."""
    if ask.user:
        return f"user {ask.user}"
    match ask.prompt:
        case Conversation(messages):
            asked = next((at for at, each in enumerate(messages) if each["role"] == "user"), 0)
            opening = "\0".join(message["content"] for message in messages[: asked + 1])
        case str(text):
            opening = text[:OPENING_CHARACTERS]
        case ids:
            opening = ",".join(map(str, ids[:OPENING_TOKENS]))
    return f"key {principal.key_id} {opening}"
