"""The tokenizer of the base model that the engine has loaded."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from gateway.engine.client import Engine
from gateway.engine.messages import ModelInfo
from gateway.engine.tokenizer import Tokenizer
from gateway.errors import EngineUnavailable

logger = logging.getLogger(__name__)

LONG_ENCODES_MAX = 2
"""Long texts that are tokenized at once. Each holds the interpreter lock for most of its time, so
more would not be faster, and would leave less of it to everybody else."""


class TokenizerSource:
    """Loads it once, in a thread, and again only if the engine comes back with another model.

    The engine takes longer to load that model: whoever knows its place uses the time by
    `load_ahead`, and no request waits for the tokenizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self.long_encodes = asyncio.Semaphore(LONG_ENCODES_MAX)
        """To be held while a long text is tokenized."""
        self._loaded: tuple[ModelInfo, Tokenizer] | None = None
        self._ahead: tuple[str, Tokenizer] | None = None

    async def load_ahead(self, model_path: str) -> None:
        """For the engine's next model, if that is the one in `model_path`."""
        async with self._lock:
            with suppress(EngineUnavailable):  # was logged, and is tried again for a request
                self._ahead = model_path, await _load(model_path)

    async def get(self) -> Tokenizer:
        """Raises EngineUnavailable while no model is loaded."""
        info = self._engine.info
        if info is None:
            raise EngineUnavailable("The base model is being loaded.")
        if self._loaded is not None and self._loaded[0] == info:
            return self._loaded[1]
        async with self._lock:
            if self._loaded is None or self._loaded[0] != info:
                path, tokenizer = self._ahead or ("", None)
                self._ahead = None  # the file may be another one when the engine comes back
                if tokenizer is None or path != info.model_path:
                    tokenizer = await _load(info.model_path)
                self._loaded = info, tokenizer
            return self._loaded[1]


async def _load(model_path: str) -> Tokenizer:
    """Raises EngineUnavailable."""
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(model_path))
        await asyncio.to_thread(tokenizer.warm_up)
    except Exception as error:
        logger.exception("the tokenizer of %s cannot be loaded", model_path)
        raise EngineUnavailable("The base model's tokenizer cannot be loaded.") from error
    return tokenizer
