import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from gateway.adapters.peft_format import Manifest, check_folder, version_digest
from gateway.adapters.store import DRAFT_S_MAX, AdapterStore, Leases, store_folder
from gateway.engine.messages import AdapterManifest
from gateway.settings import Adapters, Settings, SettingsError
from tests.adapters.making import INFO, write_folder


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    store = AdapterStore(tmp_path / "store")
    store.open()
    return store


def put(store: AdapterStore) -> tuple[str, Manifest]:
    draft = store.begin()
    manifest = check_folder(write_folder(draft), INFO)
    digest = version_digest(manifest)
    store.put(draft, digest, manifest)
    store.discard(draft)
    return digest, manifest


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_version_is_a_folder_of_its_own(store: AdapterStore, tmp_path: Path) -> None:
    digest, manifest = put(store)
    ref = store.ref(digest)
    folder = Path(ref.folder)
    assert folder == tmp_path / "store" / digest[:2] / digest
    assert folder.is_absolute()
    assert store.has(digest)
    assert (folder / "adapter_config.json").read_bytes() == manifest.config
    read = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=AdapterManifest)
    assert read == manifest.engine


def test_the_same_content_is_kept_once(store: AdapterStore, tmp_path: Path) -> None:
    digest, _ = put(store)
    files = everything_in(tmp_path / "store")
    assert put(store)[0] == digest
    assert everything_in(tmp_path / "store") == files
    assert len(files) == 3


def test_the_same_content_may_be_put_by_many_at_once(store: AdapterStore, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        digests = {digest for digest, _ in threads.map(lambda _: put(store), range(24))}
    assert len(digests) == 1
    assert len(everything_in(tmp_path / "store")) == 3


def test_a_draft_that_is_not_put_leaves_nothing(store: AdapterStore, tmp_path: Path) -> None:
    draft = store.begin()
    write_folder(draft)
    assert len(everything_in(tmp_path / "store")) == 2
    store.discard(draft)
    store.discard(draft)
    assert everything_in(tmp_path / "store") == []


def test_a_version_is_removed_with_all_its_files(store: AdapterStore, tmp_path: Path) -> None:
    digest, _ = put(store)
    store.remove(digest)
    assert not store.has(digest)
    assert everything_in(tmp_path / "store") == []
    store.remove(digest)


def test_only_the_owner_reads_the_store(store: AdapterStore, tmp_path: Path) -> None:
    digest, _ = put(store)
    for folder in (tmp_path / "store" / "drafts", Path(store.ref(digest).folder)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_opening_clears_away_old_drafts_only(store: AdapterStore, tmp_path: Path) -> None:
    old, new = (tmp_path / "store" / "drafts" / name for name in ("old", "new"))
    for draft in (old, new):
        draft.mkdir()
        (draft / "file").write_text("x")
    past = time.time() - DRAFT_S_MAX - 10
    os.utime(old, (past, past))
    store.open()
    assert [draft.name for draft in (tmp_path / "store" / "drafts").iterdir()] == ["new"]


def test_a_store_elsewhere_is_refused(tmp_path: Path) -> None:
    assert store_folder(Settings(data_dir=tmp_path)) == tmp_path / "adapters"
    assert store_folder(Settings(adapters=Adapters(store="/srv/x"))) == Path("/srv/x")
    with pytest.raises(SettingsError, match="must be a folder"):
        store_folder(Settings(adapters=Adapters(store="s3://bucket/x")))


def test_the_last_lease_of_a_retired_version_says_that_it_may_go() -> None:
    leases = Leases()
    leases.take("a")
    leases.take("a")
    assert not leases.retire("a")
    assert not leases.give("a")
    assert leases.give("a")
    assert leases.retire("a")


def test_a_lease_of_a_version_that_stays_says_nothing() -> None:
    leases = Leases()
    leases.take("a")
    assert not leases.give("a")
    with pytest.raises(AssertionError):
        leases.give("a")
