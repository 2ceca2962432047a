"""What was received of an adapter, brought into PEFT's two files and checked."""

from pathlib import Path

from gateway.adapters import shards
from gateway.adapters.archive import ARCHIVE_FILE, unpack
from gateway.adapters.peft_format import Manifest, check_folder
from gateway.engine.messages import ModelInfo


def check_draft(
    draft: Path, info: ModelInfo, bytes_max: int, weights_sha256: str | None = None
) -> Manifest:
    """Unpack the archive, join the shards, if there are such, and check what comes of it.

    `bytes_max`: of the weights. Raises InvalidAdapter, TooLarge.
    """
    archive = draft / ARCHIVE_FILE
    if archive.exists():
        unpack(archive, draft, bytes_max)
        archive.unlink()
    if shards.is_sharded(draft):
        weights_sha256 = shards.join(draft)
    return check_folder(draft, info, weights_sha256)
