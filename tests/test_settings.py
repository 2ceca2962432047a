from pathlib import Path

import pytest

from gateway import settings
from gateway.settings import Secret, Settings, SettingsError

PLANTED = "planted-value-that-must-not-show"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_nothing_needs_to_be_set() -> None:
    loaded = settings.load(environ={"HOME": "/", "PORT": "1"})
    assert (loaded.server.host, loaded.server.port) == ("127.0.0.1", 8080)


def test_the_environment_wins_over_the_file() -> None:
    Path("loragate.toml").write_text("[server]\nport = 9000\nhost = '0.0.0.0'\n")
    loaded = settings.load(environ={"LORAGATE_SERVER__PORT": "9001"})
    assert (loaded.server.port, loaded.server.host) == (9001, "0.0.0.0")


def test_a_named_file_is_read_in_place_of_the_default(tmp_path: Path) -> None:
    Path("loragate.toml").write_text("[server]\nport = 9000\n")
    other = tmp_path / "other.toml"
    other.write_text("data_dir = '~/data'\n")
    loaded = settings.load(other, environ={})
    assert loaded.server.port == 8080
    assert loaded.data_dir == Path.home() / "data"


def test_short_names_reach_their_settings() -> None:
    loaded = settings.load(
        environ={
            "DATABASE_URL": "postgresql://db/x",
            "ADAPTER_STORE": "/adapters",
            "LORAGATE_MODEL": "/model.gguf",
            "LORAGATE_DATA_DIR": "/data",
        }
    )
    assert loaded.database.url.reveal() == "postgresql://db/x"
    assert loaded.adapters.store == "/adapters"
    assert loaded.engine.model == "/model.gguf"
    assert loaded.data_dir == Path("/data")


def test_variables_that_kubernetes_makes_for_a_service_named_loragate_are_left_alone() -> None:
    environ = {
        "LORAGATE_PORT": "tcp://10.0.0.1:8080",
        "LORAGATE_SERVICE_HOST": "10.0.0.1",
        "LORAGATE_SERVICE_PORT_HTTP": "8080",
        "LORAGATE_PORT_8080_TCP_PROTO": "tcp",
    }
    assert settings.load(environ=environ).server.port == 8080


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"LORAGATE_SERVER__PORT": "http"}, r"\$\.server\.port"),
        ({"LORAGATE_SERVER__PORT": "70000"}, r"server\.port"),
        ({"LORAGATE_SERVER__PORT": "-1"}, r"server\.port"),
        ({"LORAGATE_SERVER__PROT": "1"}, r"`prot`.*\$\.server"),
        ({"LORAGATE_SERVER__BODY_BYTES_MAX": "0"}, r"server\.body_bytes_max"),
        ({"LORAGATE_SERVER__DRAIN_S": "nan"}, r"server\.drain_s"),
        ({"LORAGATE_KEYS__ENVIRONMENT": "Test"}, r"keys\.environment"),
        ({"LORAGATE_KEYS__ENVIRONMENT": "a_b"}, r"keys\.environment"),
        ({"LORAGATE_KEYS__ENVIRONMENT": "sk"}, r"keys\.environment"),
        ({"LORAGATE_KEYS__ENVIRONMENT": "x" * 13}, r"keys\.environment"),
        ({"LORAGATE_SEVER__PORT": "1"}, "`sever`"),
        ({"LORAGATE_ENGINE__DEVICE": "tpu"}, r"\$\.engine\.device"),
        ({"LORAGATE_DATA_DIR__X": "1"}, r"\$\.data_dir"),
        ({"LORAGATE_ENGINE__MODEL": "a", "LORAGATE_ENGINE__MODEL__X": "b"}, "`model`"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        settings.load(environ=environ)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        settings.load(tmp_path / "missing.toml", environ={})
    Path("loragate.toml").write_text("port = ")
    with pytest.raises(SettingsError, match=r"loragate\.toml"):
        settings.load(environ={})
    Path("loragate.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(SettingsError, match=r"loragate\.toml"):
        settings.load(environ={})


def test_f13_a_secret_shows_in_no_text_form() -> None:
    secret = Secret(PLANTED)
    tree = settings.load(
        environ={"DATABASE_URL": f"postgresql://u:{PLANTED}@h/d", "LORAGATE_KEYS__PEPPER": PLANTED}
    )
    shown = f"{secret} {secret!r} {tree} {tree!r} {[secret]} {tree.keys:}"
    assert PLANTED not in shown
    assert secret.reveal() == PLANTED
    assert secret
    assert not Secret("")


def test_f13_the_admin_key_has_a_short_name_and_does_not_show() -> None:
    tree = settings.load(environ={"LORAGATE_ADMIN_KEY": PLANTED})
    assert tree.keys.admin.reveal() == PLANTED
    assert PLANTED not in f"{tree} {tree!r}"


def test_f13_a_secret_of_the_wrong_type_is_named_and_not_shown() -> None:
    Path("loragate.toml").write_text(f"[keys]\npepper = ['{PLANTED}']\n")
    with pytest.raises(SettingsError, match=r"\$\.keys\.pepper") as error:
        settings.load(environ={})
    assert PLANTED not in str(error.value)


def test_the_tree_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().data_dir = Path("/")  # type: ignore[misc]  # that is the test
