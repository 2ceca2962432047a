"""The tokenizer of the base model that the engine has loaded."""

import asyncio
import logging
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
    """Loads it once, in a thread, and again only if the engine comes back with another model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self.long_encodes = asyncio.Semaphore(LONG_ENCODES_MAX)
        """To be held while a long text is tokenized."""
        self._loaded: tuple[ModelInfo, Tokenizer] | None = None

    async def get(self) -> Tokenizer:
        """Raises EngineUnavailable while no model is loaded."""
        info = self._engine.info
        if info is None:
            raise EngineUnavailable("The base model is being loaded.")
        if self._loaded is not None and self._loaded[0] == info:
            return self._loaded[1]
        async with self._lock:
            if self._loaded is None or self._loaded[0] != info:
                self._loaded = info, await self._load(info)
            return self._loaded[1]

    async def _load(self, info: ModelInfo) -> Tokenizer:
        try:
            return await asyncio.to_thread(Tokenizer.load, Path(info.model_path))
        except Exception as error:
            logger.exception("the tokenizer of %s cannot be loaded", info.name)
            raise EngineUnavailable("The base model's tokenizer cannot be loaded.") from error
