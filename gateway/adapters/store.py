"""Where adapter versions lie: a folder for each, made whole or not at all.

    <store>/<first 2 digits>/<digest>/   the two files of PEFT, and the engine's manifest.json
    <store>/drafts/…                     what is being written or removed

All methods block; call them in a thread.
"""

import os
import re
import shutil
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.adapters.names import Names
from gateway.adapters.peft_format import CONFIG_FILE, Manifest
from gateway.adapters.sandbox import Sandbox
from gateway.engine.messages import MANIFEST_FILE, WEIGHTS_FILE, AdapterManifest, AdapterRef
from gateway.settings import Settings, SettingsError

DRAFT_S_MAX = 24 * 3600
"""A draft older than this was left by a crash."""

DIGEST = re.compile(r"[0-9a-f]{64}")


def store_folder(settings: Settings) -> Path:
    """Raises SettingsError for a place that is not a folder."""
    if "://" in settings.adapters.store:
        raise SettingsError("adapters.store must be a folder; other stores are not there yet.")
    return Path(settings.adapters.store or settings.data_dir / "adapters").expanduser()


class Leases:
    """Who still needs which version: a retired one is removed when the last lease is given back."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._retired: set[str] = set()
        self.retirements = 0
        """How often a version was retired: while it stays, none has begun to go."""

    def take(self, digest: str) -> None:
        self._taken[digest] += 1

    def give(self, digest: str) -> bool:
        """Whether the version waited for just this, and can be collected now."""
        assert self._taken[digest] > 0, "a lease was given back twice"
        self._taken[digest] -= 1
        if self._taken[digest]:
            return False
        del self._taken[digest]
        waited = digest in self._retired
        self._retired.discard(digest)
        return waited

    def retire(self, digest: str) -> bool:
        """Whether nobody has a lease; otherwise the last one's `give` will tell."""
        self.retirements += 1
        if self._taken[digest]:
            self._retired.add(digest)
            return False
        return True


class AdapterStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the engine may run in another working folder
        self._drafts = self._folder / "drafts"
        self.leases = Leases()
        self.names = Names()
        self.uploads = 0
        """Drafts being received now by this process."""
        self.sandbox = Sandbox()
        """Where drafts are checked."""

    def open(self) -> None:
        """Make the folder, and clear away what a crash left behind."""
        self._drafts.mkdir(parents=True, exist_ok=True, mode=0o700)
        for draft in self._drafts.iterdir():
            with suppress(FileNotFoundError):  # another process clears away, too
                if time.time() - draft.stat().st_mtime > DRAFT_S_MAX:
                    shutil.rmtree(draft, ignore_errors=True)

    def begin(self) -> Path:
        """A new draft: a folder to write an adapter into, until `put` or `discard`."""
        folder = self._drafts / uuid.uuid4().hex
        folder.mkdir(mode=0o700)
        return folder

    def discard(self, draft: Path) -> None:
        """Remove a draft; what `put` has taken over stays."""
        shutil.rmtree(draft, ignore_errors=True)

    def ref(self, digest: str) -> AdapterRef:
        return AdapterRef(digest, str(self._place(digest)))

    def has(self, digest: str) -> bool:
        return self._place(digest).is_dir()

    def put(self, draft: Path, digest: str, manifest: Manifest) -> AdapterRef:
        """Make the draft, which has the weights, the version `digest`. Same content is kept once.

        On disk for good when this returns. Safe beside other uploads of the same content.
        """
        (draft / CONFIG_FILE).write_bytes(manifest.config)
        (draft / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest.engine))
        for name in (CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE):
            _sync(draft / name)
        _sync(draft)
        place = self._place(digest)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        _sync(self._folder)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            os.utime(place)  # it is wanted again: no janitor may think that it was left behind
        _sync(place.parent)
        return self.ref(digest)

    def remove(self, digest: str) -> None:
        """Take the version out of sight at once, then delete it. Not being there is fine."""
        trash = self._drafts / uuid.uuid4().hex
        with suppress(FileNotFoundError):
            self._place(digest).rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def untouched(self, seconds: float) -> list[str]:
        """Digests of the versions whose folders were put here longer ago than that."""
        before = time.time() - seconds
        found = []
        for folder in self._folder.glob("??/*"):
            if DIGEST.fullmatch(folder.name):
                with suppress(FileNotFoundError):  # another process removes some, too
                    if folder.stat().st_mtime < before:
                        found.append(folder.name)
        return found

    def manifest(self, digest: str) -> AdapterManifest:
        """Raises OSError for a version that is not here."""
        text = (self._place(digest) / MANIFEST_FILE).read_bytes()
        return msgspec.json.decode(text, type=AdapterManifest)

    def _place(self, digest: str) -> Path:
        assert len(digest) == 64, "names of folders are ours"
        assert digest.isalnum(), "names of folders are ours"
        return self._folder / digest[:2] / digest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
