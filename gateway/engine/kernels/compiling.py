"""How the CPU's loops are compiled: by Numba, on the machine, once.

Numba keeps compiled functions on disk and takes them from there until the file changes that a
function stands in. Our entry points are made of code from many files, so the folder they are kept
in is named after all of it.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_HERE = Path(__file__).parent


def _cache_folder() -> Path | None:
    """Where NUMBA_CACHE_DIR says, or beside the code, else in the user's cache; None where that
    can't be written."""
    digest = hashlib.sha256()
    for file in sorted(_HERE.glob("*.py")):
        digest.update(file.read_bytes())
    name = f"loops-{digest.hexdigest()[:16]}"
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    asked = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(asked)] if asked else [_HERE / "__pycache__", users / "loragate"]
    for folder in folders:
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder / name, os.W_OK):
            return folder / name
    return None


_folder = _cache_folder()
if _folder is not None:
    numba.config.CACHE_DIR = str(_folder)

piece: Decorator = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A part of entry points. What Python would call it by is left out, which saves a quarter of the
time: calling it from there ends the process."""
entry: Decorator = njit(nogil=True, cache=_folder is not None)
"""Called from Python."""
