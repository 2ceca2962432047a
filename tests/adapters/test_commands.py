import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.adapters.commands import adapters_group
from tests.adapters.conftest import Site
from tests.adapters.making import config, tensors, weights, write_folder


def run(site: Site, *arguments: str) -> Result:
    environment = {
        "LORAGATE_URL": site.live.url,
        "LORAGATE_API_KEY": site.live.key(site.tenant),
    }
    return CliRunner().invoke(adapters_group, arguments, env=environment)


def test_a_folder_is_pushed_listed_and_deleted(site: Site, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pirate")
    pushed = run(site, "push", str(folder))
    assert pushed.exit_code == 0, pushed.output
    assert pushed.stdout.startswith("pirate  ready  rank 4")
    assert site.names() == ["pirate"]
    assert run(site, "list").stdout == pushed.stdout
    listed = json.loads(run(site, "list", "--json").stdout)
    assert [adapter["name"] for adapter in listed] == ["pirate"]
    assert run(site, "delete", "pirate").stdout == f"Deleted {listed[0]['id']}.\n"
    assert site.names() == []


def test_progress_goes_to_the_error_stream(site: Site, tmp_path: Path) -> None:
    pushed = run(site, "push", str(write_folder(tmp_path)), "--name", "pirate", "--json")
    assert json.loads(pushed.stdout)["name"] == "pirate"
    assert "Uploading" in pushed.stderr


def test_the_servers_reason_is_shown(site: Site, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pirate", config(use_dora=True))
    pushed = run(site, "push", str(folder))
    assert pushed.exit_code == 1
    assert "DoRA is not served yet. (422)" in pushed.stderr
    missing = run(site, "delete", "a/b?c")
    assert missing.exit_code == 1
    assert "There is no" in missing.stderr


def test_a_folder_without_an_adapter_is_refused_here(site: Site, tmp_path: Path) -> None:
    pushed = run(site, "push", str(tmp_path))
    assert pushed.exit_code == 1
    assert "adapter_config.json is missing" in pushed.stderr


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    arguments = ["--url", "http://127.0.0.1:9", "--key", "x", "list"]
    result = CliRunner().invoke(adapters_group, arguments)
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in result.stderr


def test_a_key_is_needed_and_never_shown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAGATE_API_KEY", raising=False)
    result = CliRunner().invoke(adapters_group, ["list"])
    assert result.exit_code == 2
    assert "LORAGATE_API_KEY" in result.stderr
    wrong = CliRunner().invoke(adapters_group, ["--url", site.live.url, "--key", "s3cr3t", "list"])
    assert wrong.exit_code == 1
    assert "s3cr3t" not in wrong.output


@pytest.mark.parametrize("command", ["list", "push", "delete"])
def test_help_needs_no_key(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAGATE_API_KEY", raising=False)
    result = CliRunner().invoke(adapters_group, [command, "--help"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("key", ["s3cr3t-é", "s3cr3t\n", "s3cr3t\udcff"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    result = CliRunner().invoke(adapters_group, ["--key", key, "list"])
    assert result.exit_code == 2
    assert "Error: The API key has characters" in result.stderr
    assert "s3cr3t" not in result.output


def test_a_url_that_is_none_is_one_line() -> None:
    result = CliRunner().invoke(adapters_group, ["--url", "http://[", "--key", "x", "list"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: http://[")


def test_versions_and_aliases_are_shown_set_and_deleted(site: Site, tmp_path: Path) -> None:
    for seed in range(2):
        site.upload("pirate", file=weights(tensors(seed=seed)))
    versions = run(site, "versions", "pirate").stdout.splitlines()
    assert [line.split()[0] for line in versions] == ["version", "v2", "v1"]
    assert versions[1].endswith("latest")
    listed = json.loads(run(site, "versions", "pirate", "--json").stdout)
    assert [version["version"] for version in listed] == [2, 1]
    put = run(site, "alias", "set", "pirate", "prod", "v1")
    assert put.exit_code == 0, put.output
    assert put.stdout.splitlines()[1].startswith(
        f"prod   pirate@prod  v1 ({listed[1]['digest']}"[:30]
    )
    split = run(site, "alias", "set", "pirate", "prod", "v1=90", "v2=10", "--json")
    shares = [
        (share["version"], share["percent"]) for share in json.loads(split.stdout)["versions"]
    ]
    assert shares == [(1, 90), (2, 10)]
    aliases = run(site, "alias", "list", "pirate").stdout.splitlines()
    assert [line.split()[0] for line in aliases] == ["alias", "latest", "prod"]
    assert "90 %, v2" in aliases[2]
    assert json.loads(run(site, "alias", "list", "pirate", "--json").stdout)[1]["alias"] == "prod"
    refused = run(site, "delete-version", "pirate", "v1")
    assert refused.exit_code == 1
    assert "`prod`" in refused.stderr
    assert run(site, "alias", "delete", "pirate", "prod").exit_code == 0
    assert run(site, "delete-version", "pirate", "v1").stdout == "Deleted version 1 of pirate.\n"


def test_a_split_that_is_none_is_refused_here(site: Site) -> None:
    for versions in (["v1", "v2"], ["v1=x", "v2=1"], ["v1=50", "v1=50"]):
        refused = run(site, "alias", "set", "pirate", "prod", *versions)
        assert refused.exit_code == 2
        assert "v1=90 v2=10" in refused.stderr
