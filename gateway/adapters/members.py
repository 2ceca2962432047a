"""Which members of an archive are the adapter, and which names no archive of one has.

    adapter_config.json                       at the top, or inside one top folder
    adapter_model.safetensors                 beside it; or the index and the shards
    README.md, tokenizer.json, …              not read

An archive is a stranger's: a name may try to leave the folder, or to look like another.
"""

import re
import unicodedata
from pathlib import PurePosixPath
from typing import NoReturn

from gateway.adapters.peft_format import CONFIG_FILE
from gateway.adapters.shards import INDEX_FILE, SHARD
from gateway.engine.messages import WEIGHTS_FILE
from gateway.errors import InvalidAdapter

MEMBERS_MAX = 1024
NAME_BYTES_MAX = 1024
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PICKLE_ADVICE = (
    "is a pickle, which is never opened here. Save the adapter with "
    "model.save_pretrained(folder, safe_serialization=True), and leave pickles out."
)


class MemberNames:
    """The names of one archive, each told once, in order."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._folder: PurePosixPath | None = None

    def wanted(self, name: str, *, folder: bool = False) -> str | None:
        """The name under which the member is kept; None: it is not read.

        Raises InvalidAdapter for a name that no adapter's archive has.
        """
        path = _checked(name)
        folded = unicodedata.normalize("NFKC", str(path)).casefold()
        if folded in self._seen and not folder:
            refuse(f"has {_shown(name)} twice, perhaps in other letters.")
        if not folder:
            self._seen.add(folded)
        if len(self._seen) > MEMBERS_MAX:
            refuse(f"has more than {MEMBERS_MAX} members.")
        if folder:
            return None
        base = unicodedata.normalize("NFKC", path.name).casefold()
        if base.endswith(PICKLES):
            refuse(f"has {_shown(name)}, which {PICKLE_ADVICE}")
        if len(path.parts) > 2:
            return None
        if not is_adapter_file(path.name):
            if is_adapter_file(base):
                refuse(f"has {_shown(name)}, which only looks like {base}.")
            return None
        if self._folder not in (None, path.parent):
            refuse(f"has adapters in several folders, {_shown(name)} among them. Pack one alone.")
        self._folder = path.parent
        return path.name


def is_adapter_file(name: str) -> bool:
    return name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE) or SHARD.fullmatch(name) is not None


def refuse(reason: str) -> NoReturn:
    raise InvalidAdapter(f"The archive {reason}", param="archive")


def _checked(name: str) -> PurePosixPath:
    if len(name.encode(errors="surrogateescape")) > NAME_BYTES_MAX:
        refuse(f"has a member with a name of more than {NAME_BYTES_MAX} bytes.")
    if any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in name):
        refuse(f"has a member with characters in its name that nobody sees: {_shown(name)}.")
    path = PurePosixPath(name)
    # what another system, or another normal form, would take for a path out of the folder
    for form in (name, unicodedata.normalize("NFKC", name)):
        if form.startswith("/") or "\\" in form or re.match(r"[A-Za-z]:", form):
            refuse(f"has a member outside of its folder: {_shown(name)}.")
        if ".." in form.split("/"):
            refuse(f"has a member outside of its folder: {_shown(name)}.")
    return path


def _shown(name: str) -> str:
    return ascii(name[:100])
