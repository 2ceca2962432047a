"""The identity of a cached KV block: a hash chain over all that decided its numbers.

A block's KV follows from its own tokens and all before them, from the adapter version (LoRA in any
layer changes keys and values of all later ones), and may be seen by one namespace only:

    root  = H(namespace, adapter version)
    key 0 = H(root, tokens of block 0)        key 1 = H(key 0, tokens of block 1)   …

Two blocks have the same key only if everything before them is the same, so a key stands for a
whole prefix (as in vLLM's prefix caching; the collision resistance is what isolates tenants).
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

KEY_BYTES = 16


class Root(NamedTuple):
    """Prefixes under different roots are never shared."""

    namespace: str
    """Opaque: the tenant's, or a narrower one."""
    adapter: str
    """Version digest; empty for the base model."""

    @property
    def key(self) -> bytes:
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        for field in self:
            text = field.encode()
            digest.update(len(text).to_bytes(8, "little") + text)
        return digest.digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block of `tokens` that follows the block, or root, `parent`."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()
