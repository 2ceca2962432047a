"""`loragate tenants` and `loragate keys`, as a shell runs them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.settings import Settings
from gateway.tenants import key_form
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
