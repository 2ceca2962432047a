import hmac
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.settings import Keys, Secret, Settings, SettingsError
from gateway.tenants.pepper import KeyHash, open_key_hash

KEY = "lg_sk_any"
PEPPER = "a pepper that an operator has chosen"

OPEN = """
import sys
from pathlib import Path
from gateway.settings import Settings
from gateway.tenants.pepper import open_key_hash
print(open_key_hash(Settings(data_dir=Path(sys.argv[1]))).of("lg_sk_any").hex())
"""


def test_a_hash_matches_its_key_and_pepper_alone() -> None:
    key_hash = KeyHash(Secret(PEPPER))
    expected = key_hash.of(KEY)
    assert len(expected) == 32
    assert key_hash.matches(KEY, expected)
    assert not key_hash.matches(KEY + "x", expected)
    assert not KeyHash(Secret(PEPPER + "x")).matches(KEY, expected)


def test_the_pepper_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    first = open_key_hash(settings).of(KEY)
    assert open_key_hash(settings).of(KEY) == first
    file = settings.data_dir / "pepper"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in settings.data_dir.iterdir()] == ["pepper"]


def test_processes_that_start_at_once_agree_on_the_pepper(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path / "data")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    assert len({one.communicate()[0] for one in running}) == 1


def test_the_pepper_of_the_settings_comes_first_and_is_not_written(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, keys=Keys(pepper=Secret(PEPPER)))
    assert open_key_hash(settings).of(KEY) == KeyHash(Secret(PEPPER)).of(KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_short_pepper_is_refused_and_not_shown(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, keys=Keys(pepper=Secret("pfeffer")))
    with pytest.raises(SettingsError, match=r"keys\.pepper") as error:
        open_key_hash(settings)
    assert "pfeffer" not in str(error.value)


def test_a_damaged_pepper_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "pepper").write_text("")
    with pytest.raises(SettingsError, match="restore it"):
        open_key_hash(Settings(data_dir=tmp_path))
    assert (tmp_path / "pepper").read_text() == ""


@pytest.mark.parametrize("length", [32, 63, 64, 65, 200])
def test_a_keys_hash_is_its_hmac_under_the_pepper(length: int) -> None:
    pepper = ("pépper!" * 40)[:length]
    key_hash = KeyHash(Secret(pepper))
    for key in ("", "lg_sk_Ab3dE6gH9j", "x" * 1000):
        assert key_hash.of(key) == hmac.digest(pepper.encode(), key.encode(), "sha256")
        assert key_hash.matches(key, hmac.digest(pepper.encode(), key.encode(), "sha256"))
        assert not key_hash.matches(key + "y", key_hash.of(key))
