"""`loragate tenants` and `loragate keys`, as a shell runs them."""

import getpass
import json
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.settings import Settings
from gateway.tenants import key_form
from gateway.tenants.announcements import CHANNEL
from gateway.tenants.keys import TENANT_SCOPES
from tests.databases import PASSWORD, free_port


class Shell:
    def __init__(self, data_dir: Path, database_url: str) -> None:
        self.settings = Settings(data_dir=data_dir)
        self.env = {"LORAGATE_DATA_DIR": str(data_dir), "DATABASE_URL": database_url}

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, env=self.env)

    def json(self, *arguments: str) -> object:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def list(self, *arguments: str) -> list[dict[str, Any]]:
        found = self.json(*arguments)
        assert isinstance(found, list)
        return found


@pytest.fixture
def shell(tmp_path: Path, database_url: str) -> Shell:
    return Shell(tmp_path / "data", database_url)


def test_a_tenant_and_its_keys_from_the_first_to_the_last(shell: Shell) -> None:
    tenant = shell.json("tenants", "create", "acme", "--name", "Acme Ltd")
    assert isinstance(tenant, dict)
    assert (tenant["slug"], tenant["name"], tenant["status"]) == ("acme", "Acme Ltd", "active")
    assert shell.json("tenants", "list") == [tenant]

    made = shell.json("keys", "create", "acme", "--name", "ci")
    assert isinstance(made, dict)
    assert key_form.public_id(made["key"]) is not None
    assert made["scopes"] == list(TENANT_SCOPES)
    listed = shell.json("keys", "list", "acme")
    assert listed == [{name: made[name] for name in made if name != "key"}]

    revoked = shell.json("keys", "revoke", "acme", made["id"])
    assert isinstance(revoked, dict)
    assert revoked["revoked_at"]
    assert shell.json("keys", "revoke", "acme", key_form.public_id(made["key"]) or "") == revoked


def test_people_get_tables(shell: Shell) -> None:
    assert shell.run("tenants", "list").stdout == "none\n"
    shell.run("tenants", "create", "acme")
    header, row = shell.run("tenants", "list").stdout.splitlines()
    assert header.split()[:4] == ["id", "slug", "name", "status"]
    assert "acme" in row
    assert header.index("slug") == row.index("acme")


def test_f13_a_key_is_shown_once_and_never_again(shell: Shell) -> None:
    shell.run("tenants", "create", "acme")
    result = shell.run("keys", "create", "acme", "--scope", "inference", "--expires-in-days", "30")
    (key,) = [word for word in result.stdout.split() if key_form.public_id(word)]
    assert "Keep the key" in result.stderr
    listed = shell.run("keys", "list", "acme").output
    assert key[17:] not in listed
    assert f"{key[:16]}_…{key[-4:]}" in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("keys", "create", "nobody"), "no tenant 'nobody'"),
        (("keys", "list", "nobody"), "no tenant 'nobody'"),
        (("tenants", "create", "No Slug"), "slug"),
        (("tenants", "create", "acme"), "already a tenant 'acme'"),
        (("keys", "revoke", "acme", "0123456789"), "no such key"),
        (
            ("keys", "create", "acme", "--scope", "admin", "--scope", "inference"),
            "cannot call models",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_change(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    shell = Shell(tmp_path, "")
    shell.run("tenants", "create", "acme")
    result = shell.run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line


@pytest.mark.parametrize("command", ["tenants list", "keys create acme", "migrate"])
def test_f16_a_database_that_is_away_is_one_line_without_its_password(
    command: str, tmp_path: Path
) -> None:
    url = f"postgresql://u:{PASSWORD}@127.0.0.1:{free_port()}/d"
    result = Shell(tmp_path, url).run(*command.split())
    assert result.exit_code == 1
    assert "database.url" in result.stderr
    assert PASSWORD not in result.output
    assert len(result.stderr.splitlines()) == 1


def test_a_migration_of_its_own_is_a_command(shell: Shell) -> None:
    for _ in range(2):
        result = shell.run("migrate")
        assert result.exit_code == 0
        assert "up to date" in result.stdout
        assert PASSWORD not in result.output


@pytest.mark.parametrize("days", ["1e308", "inf", "nan", "999999999", "0", "-1"])
def test_days_that_no_calendar_has_are_refused_with_the_range(days: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path, "")
    shell.run("tenants", "create", "acme")
    result = shell.run("keys", "create", "acme", "--expires-in-days", days)
    assert result.exit_code == 2
    assert "is not in the range 0<x<=36500" in result.stderr
    assert shell.json("keys", "list", "acme") == []


def test_f40_an_admin_key_is_made_by_the_shell_and_by_no_other_scope(shell: Shell) -> None:
    made = shell.json("keys", "create", "--admin", "--name", "console")
    assert isinstance(made, dict)
    assert made["key"].startswith("lg_admin_")
    assert made["scopes"] == ["admin"]
    (listed,) = shell.list("keys", "list", "--admin")
    assert listed["redacted"] == f"{made['key'][:19]}_…{made['key'][-4:]}"
    rotated = shell.json("keys", "rotate", made["id"], "--admin", "--overlap-hours", "1")
    assert isinstance(rotated, dict)
    assert rotated["key"].startswith("lg_admin_")
    old, new = shell.list("keys", "list", "--admin")
    assert old["replaced_by"] == new["id"]
    revoked = shell.json("keys", "revoke", new["id"], "--admin")
    assert isinstance(revoked, dict)
    assert revoked["revoked_at"]


def test_a_generated_admin_key_is_one_that_the_settings_take(tmp_path: Path) -> None:
    result = Shell(tmp_path / "data", "").run("keys", "generate")
    assert key_form.is_admin(result.stdout.strip())
    assert not (tmp_path / "data").exists(), "nothing is stored"


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "create"),
        ("keys", "create", "acme", "--admin"),
        ("keys", "create", "--admin", "--scope", "inference"),
        ("keys", "create", "--admin", "--adapter", "pirate"),
        ("keys", "list"),
        ("keys", "list", "acme", "--admin"),
        ("keys", "revoke"),
        ("keys", "revoke", "0123456789"),
        ("keys", "revoke", "acme", "0123456789", "--admin"),
        ("keys", "rotate", "a", "b", "c"),
        ("keys", "rotate", "acme", "b", "--overlap-hours", "nan"),
        ("limits", "set", "acme", "--adapters-max", "-1"),
        ("limits", "set", "acme", "--adapters-max", "many"),
        ("audit", "verify", "--anchor", "17"),
        ("audit", "export", "--format", "xml"),
    ],
)
def test_a_command_that_cannot_be_is_refused_before_anything_is_opened(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    result = Shell(tmp_path / "data", "").run(*arguments)
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "data").exists()


def test_a_tenant_with_a_plan_is_set_suspended_activated_and_deleted(shell: Shell) -> None:
    shell.json("plans", "set", "pro", "--requests-per-minute", "60", "--adapters-max", "5")
    made = shell.json("tenants", "create", "acme", "--plan", "pro", "--weight", "2")
    assert isinstance(made, dict)
    assert (made["plan"], made["weight"]) == ("pro", 2.0)
    assert shell.json("tenants", "show", "acme") == made
    changed = shell.json("tenants", "set", "acme", "--weight", "3", "--name", "Acme")
    assert changed == made | {"weight": 3.0, "name": "Acme"}
    for verb, status in (("suspend", "suspended"), ("activate", "active")):
        moved = shell.json("tenants", verb, "acme")
        assert moved == made | {"weight": 3.0, "name": "Acme", "status": status}
    asked = shell.run("tenants", "delete", "acme")  # nobody answers the question
    assert asked.exit_code == 1
    deleted = shell.json("tenants", "delete", "acme", "--yes")
    assert isinstance(deleted, dict)
    assert deleted["status"] == "deleted"
    refused = shell.run("keys", "create", "acme")
    assert (refused.exit_code, "deleted" in refused.stderr) == (1, True)


def test_limits_are_shown_and_set_for_tenants_keys_and_plans(shell: Shell) -> None:
    shell.json("plans", "set", "pro", "--requests-per-minute", "60", "--adapters-max", "5")
    shell.run("tenants", "create", "acme", "--plan", "pro")
    found = shell.json("limits", "set", "acme", "--adapters-max", "2", "--tokens-per-minute", "9")
    assert isinstance(found, dict)
    assert (found["own"]["adapters_max"], found["effective"]["adapters_max"]) == (2, 2)
    assert found["effective"]["requests_per_minute"] == 60
    found = shell.json("limits", "set", "acme", "--adapters-max", "none")
    assert isinstance(found, dict)
    assert (found["own"]["adapters_max"], found["effective"]["adapters_max"]) == (None, 5)
    assert found["own"]["tokens_per_minute"] == 9
    assert shell.json("limits", "show", "acme") == found
    lines = shell.run("limits", "show", "acme").stdout.splitlines()
    assert lines[0].split() == ["limit", "own", "effective"]
    assert ["adapters_max", "-", "5"] in [line.split() for line in lines]

    key = shell.json("keys", "create", "acme")
    assert isinstance(key, dict)
    own = shell.json("limits", "set", "acme", "--key", key["id"], "--requests-per-minute", "1")
    assert isinstance(own, dict)
    assert own["requests_per_minute"] == 1
    assert shell.json("limits", "show", "acme", "--key", key["id"]) == own
    refused = shell.run("limits", "set", "acme", "--key", key["id"], "--adapters-max", "1")
    assert refused.exit_code == 1

    (plan,) = shell.list("plans", "list")
    assert shell.json("plans", "show", "pro") == plan
    assert plan["requests_per_minute"] == 60
    assert "acme" in shell.run("plans", "delete", "pro").stderr
    shell.run("tenants", "set", "acme", "--plan", "")
    assert shell.run("plans", "delete", "pro").exit_code == 0
    assert shell.list("plans", "list") == []


def test_f13_every_change_of_the_shell_is_on_record_under_its_user_without_a_secret(
    shell: Shell, tmp_path: Path
) -> None:
    shell.run("tenants", "create", "acme")
    key = shell.json("keys", "create", "acme", "--network", "10.0.0.0/8", "--adapter", "pirate")
    assert isinstance(key, dict)
    shell.run("keys", "revoke", "acme", key["id"])
    entries = shell.list("audit", "list")
    assert [entry["action"] for entry in entries] == ["key.revoke", "key.create", "tenant.create"]
    assert {entry["actor"] for entry in entries} == {f"shell:{getpass.getuser()}"}
    assert entries[1]["after"]["allowed_networks"] == ["10.0.0.0/8"]
    exported = shell.run("audit", "export").stdout
    assert [json.loads(line)["sequence"] for line in exported.splitlines()] == [1, 2, 3]
    table = shell.run("audit", "list").stdout
    as_csv = shell.run("audit", "export", "--format", "csv").stdout
    for text in (exported, table, as_csv):
        assert key["key"][17:60] not in text
    assert len(shell.run("audit", "export", "--tenant", "acme").stdout.splitlines()) == 3

    verified = shell.json("audit", "verify")
    assert isinstance(verified, dict)
    assert (verified["intact"], verified["entries"]) == (True, 3)
    shell.run("tenants", "create", "other")
    assert shell.run("audit", "verify", "--anchor", verified["head"]).exit_code == 0
    broken = shell.run("audit", "verify", "--anchor", f"2:{verified['head'][2:]}")
    assert broken.exit_code == 1
    assert "anchor is another" in broken.stdout


def test_f15_a_change_of_the_shell_is_announced_to_the_gateways(
    shell: Shell, redis_url: str
) -> None:
    shell.run("tenants", "create", "acme")
    made = shell.json("keys", "create", "acme")
    assert isinstance(made, dict)
    with redis.Redis.from_url(redis_url) as client, client.pubsub() as channel:
        channel.subscribe(CHANNEL)
        assert channel.get_message(timeout=5.0) is not None  # that it is subscribed
        shell.env["REDIS_URL"] = redis_url
        shell.run("keys", "revoke", "acme", made["id"])
        message = channel.get_message(timeout=5.0)
    assert message is not None
    assert json.loads(message["data"])["keys"] == [key_form.public_id(made["key"])]


def test_a_redis_that_is_away_stops_no_change_and_is_said(shell: Shell) -> None:
    shell.run("tenants", "create", "acme")
    shell.env["REDIS_URL"] = f"redis://127.0.0.1:{free_port()}/0"
    assert shell.run("tenants", "suspend", "acme").exit_code == 0
    suspended = shell.json("tenants", "show", "acme")
    assert isinstance(suspended, dict)
    assert suspended["status"] == "suspended"
