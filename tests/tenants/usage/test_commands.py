"""`loragate usage`, `prices` and `budgets`, as a shell runs them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.db import Database, async_url, now
from gateway.tenants.usage import entries
from gateway.tenants.usage.entries import Entry


class Shell:
    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.env = {"LORAGATE_DATA_DIR": str(data_dir)}

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, env=self.env)

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def use(self, *found: Entry) -> None:
        async def write() -> None:
            database = Database(async_url("", self.data_dir))
            await entries.write(database, found)
            await database.close()

        asyncio.run(write())


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


def test_prices_are_set_and_listed(shell: Shell) -> None:
    tenant = shell.json("tenants", "create", "acme")
    first = shell.json("prices", "set", "*", "--input", "0.50", "--output", "1.25")
    own = ("--cached-input", "0", "--tenant", "acme")
    second = shell.json("prices", "set", "base", "--input", "1", "--output", "2.000001", *own)
    assert (first["tenant_id"], first["input"], first["cached_input"]) == (None, "0.5", "0.5")
    assert (second["tenant_id"], second["cached_input"]) == (tenant["id"], "0")
    assert second["output"] == "2.000001"
    assert shell.json("prices", "list") == [first, second]


def test_budgets_are_set_listed_and_deleted(shell: Shell) -> None:
    tenant = shell.json("tenants", "create", "acme")
    key = shell.json("keys", "create", "acme")
    month = shell.json("budgets", "set", "acme", "month", "25", "--alert", "80", "--alert", "100")
    assert (month["owner"], month["amount"]) == (f"tenant:{tenant['id']}", "25")
    assert (month["hard"], month["alert_percents"]) == (True, [80, 100])
    day = shell.json("budgets", "set", "acme", "day", "0.5", "--key", key["id"], "--soft")
    assert (day["owner"], day["amount"], day["hard"]) == (f"key:{key['id']}", "0.5", False)
    assert shell.json("budgets", "list", "acme") == [month, day]
    assert shell.json("budgets", "delete", "acme", month["id"]) == month
    assert shell.json("budgets", "list", "acme") == [day]


def test_usage_is_a_table_for_people_and_lines_for_scripts(shell: Shell) -> None:
    tenants = [shell.json("tenants", "create", name)["id"] for name in ("acme", "rival")]
    for number in range(4):
        shell.use(
            Entry(
                f"r{number}",
                tenants[number // 3],
                "k",
                "base",
                now(),
                completion_tokens=2,
                cost_nanos=1_250_000,
            )
        )
    header, row = shell.run("usage", "acme").stdout.splitlines()
    assert header.split() == [
        "day", "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost",
    ]  # fmt: skip
    assert row.split()[1:] == ["3", "0", "0", "6", "0.00375"]
    lines = shell.run("usage", "--by", "tenant", "--json").stdout.splitlines()
    assert [json.loads(line)["tenant"] for line in lines] == ["acme", "rival"]
    table = shell.run("usage", "rival", "--by", "model,key", "--csv").stdout.splitlines()
    assert table == [
        "model,key_id,requests,prompt_tokens,cached_tokens,completion_tokens,cost_nanos",
        "base,k,1,0,0,2,1250000",
    ]
    assert shell.run("usage", "acme", "--end", "2020-01-01").stdout == "none\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("usage", "nobody"), "no tenant 'nobody'"),
        (("usage", "--by", "colour"), "'colour'"),
        (("usage", "--start", "yesterday"), "`start`"),
        (("prices", "set", "*", "--input", "-1", "--output", "1"), "no amount"),
        (("prices", "set", "*", "--input", "nan", "--output", "1"), "no amount"),
        (("prices", "set", "*", "--input", "1e999999999", "--output", "1"), "no amount"),
        (("prices", "set", "*", "--input", "0.0000001", "--output", "1"), "no amount"),
        (("prices", "set", "*", "--input", "1", "--output", "1", "--from", "2020-01-01"), "past"),
        (("budgets", "set", "nobody", "day", "1"), "no tenant 'nobody'"),
        (("budgets", "set", "acme", "day", "1", "--key", "x"), "no such key"),
        (("budgets", "set", "acme", "day", "1", "--webhook", "http://h/"), "usage.webhook_secret"),
        (("budgets", "delete", "acme", "x"), "no budget 'x'"),
    ],
)
def test_a_mistake_says_what_to_change(
    arguments: tuple[str, ...], message: str, shell: Shell
) -> None:
    shell.run("tenants", "create", "acme")
    result = shell.run(*arguments)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert message in result.stderr
