"""All settings: one frozen tree, read once from `loragate.toml` and the environment.

Environment wins over the file. A variable names its place in the tree with double underscores,
`LORAGATE_ENGINE__POOL_MIB=2048`; what an operator swaps most has a short name as well.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from gateway.engine.messages import EngineSettings

PREFIX = "LORAGATE_"
SHORT_NAMES = {
    "DATABASE_URL": ("database", "url"),
    "REDIS_URL": ("redis", "url"),
    "ADAPTER_STORE": ("adapters", "store"),
    "LORAGATE_MODEL": ("engine", "model"),
    "LORAGATE_ADMIN_KEY": ("keys", "admin"),
}

ENVIRONMENT = re.compile(r"(?!(?:sk|admin)$)[a-z0-9]{0,12}")


class SettingsError(Exception):
    """The configuration cannot be used; the message names the setting and the fault."""


class Secret:
    """A string that never shows itself in a log, an error or a `repr`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "Secret(…)"

    __str__ = __repr__


class Server(Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for every network this machine is in."""
    port: int = 8080
    """TCP port to listen on."""
    body_bytes_max: int = 4 * 2**20
    """Largest JSON body."""
    drain_s: float = 20.0
    """How long running streams may finish after a stop signal."""
    trusted_proxies: str = ""
    """Networks of the proxies before this server, `10.0.0.0/8, fd00::/8`: the address that they say
    a request comes from (X-Forwarded-For) is believed, and nobody else's word."""
    first_token_s_max: float = 300.0
    """A request that would not get its first token within so many seconds is refused with 503 and
    Retry-After when it arrives; one that waited so long in vain is given up."""


class Database(Struct, frozen=True, forbid_unknown_fields=True):
    url: Secret = field(default_factory=lambda: Secret(""))
    """SQLAlchemy URL, `sqlite:///…` or `postgresql://…`; empty: a SQLite file in `data_dir`."""
    pool_size: int = 10
    """Connections kept to PostgreSQL by this process."""


class Redis(Struct, frozen=True, forbid_unknown_fields=True):
    url: Secret = field(default_factory=lambda: Secret(""))
    """`redis://…`, `rediss://…` with TLS; empty: what replicas would share is kept in this process,
    which is right for one of them."""
    pool_size: int = 32
    """Connections kept to Redis by this process."""


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    without_redis: Literal["local", "closed"] = "local"
    """What holds for requests with limits while Redis is away: `local` counts them in each process,
    at limit ÷ replicas; `closed` refuses them with 503 and Retry-After."""
    without_redis_s: float = 300.0
    """How long `local` holds; after that it is as with `closed`."""
    replicas: int = 1
    """Gateway processes that share the Redis."""


class Adapters(Struct, frozen=True, forbid_unknown_fields=True):
    store: str = ""
    """Folder of the adapter store; empty: `adapters` in `data_dir`."""
    upload_bytes_max: int = 512 * 2**20
    """Largest adapter file."""
    tenant_adapters_max: int = 1000
    """Adapters one tenant may keep."""


class Keys(Struct, frozen=True, forbid_unknown_fields=True):
    pepper: Secret = field(default_factory=lambda: Secret(""))
    """Secret under which API keys are hashed; empty: made once and kept in `data_dir`."""
    environment: str = ""
    """A word in the prefix of new keys: with `test` they begin with `lg_test_sk_`, and nobody takes
    them for those of another installation. Up to 12 lower-case letters and digits."""
    admin: Secret = field(default_factory=lambda: Secret(""))
    """An admin key that is in no database, to create the others with: one that `loragate keys
    generate` made. Empty: none."""


class Usage(Struct, frozen=True, forbid_unknown_fields=True):
    webhook_secret: Secret = field(default_factory=lambda: Secret(""))
    """Secret under which messages to webhooks are signed; empty: budgets can have no webhook."""
    webhook_local: bool = False
    """Whether webhooks may lie on this machine, or in networks that only it can reach."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    data_dir: Path = Path(".loragate")
    """Everything the embedded default stores: database, adapters, pepper."""
    server: Server = field(default_factory=Server)
    database: Database = field(default_factory=Database)
    redis: Redis = field(default_factory=Redis)
    limits: Limits = field(default_factory=Limits)
    adapters: Adapters = field(default_factory=Adapters)
    keys: Keys = field(default_factory=Keys)
    usage: Usage = field(default_factory=Usage)
    engine: EngineSettings = field(default_factory=EngineSettings)


def load(file: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the file (default `loragate.toml`, if it is there), then the environment over it.

    Raises SettingsError naming the setting that cannot be used.
    """
    environ = os.environ if environ is None else environ
    tree = _read_file(file)
    for name, value in environ.items():
        if path := _place(name):
            _put(tree, path, value)
    try:
        settings = msgspec.convert(tree, Settings, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{error}. See docs/configuration.md.") from None
    _check_numbers(settings)
    if not ENVIRONMENT.fullmatch(settings.keys.environment):
        raise SettingsError(
            "keys.environment: up to 12 lower-case letters and digits, not `sk` and not `admin`."
        )
    return settings


def check_model(settings: Settings) -> None:
    """Raises SettingsError if there is no model to serve."""
    model = settings.engine.model
    if not model:
        raise SettingsError(
            "engine.model is not set: name a Hugging Face folder or a GGUF file, "
            "LORAGATE_MODEL=/path/to/model. `make demo` fetches a small one."
        )
    if not Path(model).expanduser().exists():
        raise SettingsError(f"engine.model: there is no {model}.")


def _place(variable: str) -> tuple[str, ...]:
    """Where an environment variable belongs in the tree; () for one that is none of ours.

    Kubernetes puts LORAGATE_PORT, LORAGATE_SERVICE_HOST and more into every container beside a
    service named loragate: without a double underscore, only our own top-level names count.
    """
    if variable in SHORT_NAMES:
        return SHORT_NAMES[variable]
    if not variable.startswith(PREFIX):
        return ()
    path = tuple(variable.removeprefix(PREFIX).lower().split("__"))
    return path if len(path) > 1 or path[0] in Settings.__struct_fields__ else ()


def _read_file(file: Path | None) -> dict[str, Any]:
    path = file or Path("loragate.toml")
    if file is None and not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # not there, not UTF-8, not TOML
        raise SettingsError(f"{path} cannot be read: {error}") from None


def _put(tree: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    *parents, last = path
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"`{name}` holds settings, and is no setting itself.")
    tree[last] = value


AT_LEAST_ONE = {
    "server.body_bytes_max",
    "server.first_token_s_max",
    "database.pool_size",
    "redis.pool_size",
    "limits.replicas",
    "adapters.upload_bytes_max",
    "engine.pool_mib",
    "engine.block_tokens",
    "engine.step_tokens",
    "engine.running_max",
    "engine.waiting_max",
}


def _check_numbers(settings: Settings) -> None:
    for section in ("server", "database", "redis", "limits", "adapters", "engine"):
        for name, value in msgspec.structs.asdict(getattr(settings, section)).items():
            least = 1 if f"{section}.{name}" in AT_LEAST_ONE else 0
            if isinstance(value, int | float) and not value >= least:
                raise SettingsError(f"{section}.{name} must be at least {least}, not {value}.")
    if settings.server.port > 65535:
        raise SettingsError(f"server.port must be at most 65535, not {settings.server.port}.")


def _decode(kind: type, value: object) -> object:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise TypeError(f"expected {kind.__name__}")
