"""`loragate adapters`: what a tenant does with its adapters, over HTTP, from any machine."""

import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx

from gateway.adapters import push

CONNECT_S = 10.0
ANSWER_S = 600.0
"""The check and the self-test of a large adapter take their time."""


class Api:
    """The server as one key sees it. Every failure is a ClickException with the server's words."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    @cached_property
    def _http(self) -> httpx.Client:
        """Opened by the first call, since `--help` of a command needs no key."""
        if not self._key:
            raise click.UsageError("An API key is needed: --key, or LORAGATE_API_KEY.")
        if not (self._key.isascii() and self._key.isprintable()):
            raise click.UsageError("The API key has characters that no key has. Copy it again.")
        return httpx.Client(
            base_url=self._url,
            headers={"authorization": f"Bearer {self._key}"},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        )

    def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.ClickException(
                f"{self._url} does not answer: {error or type(error).__name__}"
            ) from None
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.is_error or not isinstance(body, dict):
            raise click.ClickException(_reason(response, body))
        return body


def _reason(response: httpx.Response, body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f"{message or 'The answer is not from a Loragate server.'} ({response.status_code})"


@click.group("adapters")
@click.option(
    "--url",
    envvar="LORAGATE_URL",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="The server; or set LORAGATE_URL.",
)
@click.option("--key", envvar="LORAGATE_API_KEY", default="", help="Or set LORAGATE_API_KEY.")
@click.pass_context
def adapters_group(ctx: click.Context, url: str, key: str) -> None:
    """Adapters of the tenant whose API key is used."""
    ctx.obj = Api(url, key)


@adapters_group.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.pass_obj
def list_adapters(api: Api, as_json: bool) -> None:
    """List all adapters."""
    adapters = api.call("GET", "/v1/adapters")["data"]
    if as_json:
        click.echo(json.dumps(adapters, indent=2))
        return
    for adapter in adapters:
        _print(adapter)


@adapters_group.command("push")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="What to call it; default: the folder's name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.pass_obj
def push_adapter(api: Api, folder: Path, name: str | None, as_json: bool) -> None:
    """Upload FOLDER, as PEFT's save_pretrained wrote it.

    A large one goes in parts: after an interruption, the same command goes on where it was.
    """
    try:
        files = push.adapter_files(folder)
    except push.NotAnAdapter as error:
        raise click.ClickException(str(error)) from None
    called = name or folder.resolve().name
    size = sum(path.stat().st_size for path in files)
    with click.progressbar(length=size, label="Uploading", file=sys.stderr) as bar:

        def moved(count: int) -> None:
            bar.update(count)
            if bar.finished:
                bar.label = "Checking"

        if size <= push.AT_ONCE_BYTES_MAX:
            adapter = push.send_at_once(api.call, called, files, moved)
        else:
            adapter = push.send_in_parts(api.call, called, files, moved, push.PART_BYTES)
    for warning in adapter["warnings"]:
        click.echo(f"Warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(adapter, indent=2))
    else:
        _print(adapter)


@adapters_group.command("delete")
@click.argument("name_or_id")
@click.pass_obj
def delete_adapter(api: Api, name_or_id: str) -> None:
    """Delete an adapter by its name or id."""
    deleted = api.call("DELETE", _path(name_or_id))
    click.echo(f"Deleted {deleted['id']}.")


@adapters_group.command("versions")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.pass_obj
def list_versions(api: Api, name: str, as_json: bool) -> None:
    """List the versions of the adapter NAME, newest first."""
    found = api.call("GET", f"{_path(name)}/versions")["data"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    _print_table(
        ["version", "digest", "MiB", "rank", "where", "requests (30 days)", "aliases"],
        [
            [
                f"v{version['version']}",
                version["digest"][:12],
                f"{version['size_bytes'] / 2**20:.1f}",
                str(version["rank"]),
                version["where"] or "?",
                str(version["requests_30d"]),
                ",".join(version["aliases"]),
            ]
            for version in found
        ],
    )


@adapters_group.command("delete-version")
@click.argument("name")
@click.argument("version")
@click.pass_obj
def delete_version(api: Api, name: str, version: str) -> None:
    """Delete a VERSION (v3, or 8 digits of its digest) of NAME that no alias means."""
    deleted = api.call("DELETE", f"{_path(name)}/versions/{quote(version, safe='')}")
    click.echo(f"Deleted version {deleted['version']} of {name}.")


@adapters_group.group("alias")
def alias_group() -> None:
    """Aliases: names for versions, which requests call as NAME@ALIAS."""


@alias_group.command("list")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.pass_obj
def list_aliases(api: Api, name: str, as_json: bool) -> None:
    """List the aliases of the adapter NAME."""
    found = api.call("GET", f"{_path(name)}/aliases")["data"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_aliases(found)


@alias_group.command("set")
@click.argument("name")
@click.argument("alias")
@click.argument("versions", nargs=-1, required=True, metavar="VERSION | V1=PERCENT V2=PERCENT")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.pass_obj
def set_alias(api: Api, name: str, alias: str, versions: tuple[str, ...], as_json: bool) -> None:
    """Let NAME@ALIAS mean a version (v3, or 8 digits of its digest), or a split of two.

    loragate adapters alias set pirate prod v1

    loragate adapters alias set pirate prod v1=90 v2=10

    To go back, set what it was before.
    """
    path = f"{_path(name)}/aliases/{quote(alias, safe='')}"
    put = api.call("PUT", path, json=_target(versions))
    if as_json:
        click.echo(json.dumps(put, indent=2))
    else:
        _print_aliases([put])


@alias_group.command("delete")
@click.argument("name")
@click.argument("alias")
@click.pass_obj
def delete_alias(api: Api, name: str, alias: str) -> None:
    """Delete an ALIAS of the adapter NAME; what it means stays."""
    api.call("DELETE", f"{_path(name)}/aliases/{quote(alias, safe='')}")
    click.echo(f"Deleted the alias {alias} of {name}.")


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"


def _target(versions: tuple[str, ...]) -> dict[str, Any]:
    """The body of a request that sets an alias."""
    if len(versions) == 1 and "=" not in versions[0]:
        return {"version": versions[0]}
    shares = dict(version.partition("=")[::2] for version in versions)
    if len(shares) != len(versions) or not all(text.isdecimal() for text in shares.values()):
        raise click.UsageError("A split is two versions with their percents: v1=90 v2=10.")
    return {"split": {version: int(percent) for version, percent in shares.items()}}


def _print(adapter: dict[str, Any]) -> None:
    mib = adapter["size_bytes"] / 2**20
    click.echo(
        f"{adapter['name']}  {adapter['status']}  rank {adapter['rank']}  {mib:.1f} MiB  "
        f"{','.join(adapter['targets'])}  {adapter['id']}"
    )


def _print_aliases(aliases: list[dict[str, Any]]) -> None:
    _print_table(
        ["alias", "model", "versions"],
        [
            [
                alias["alias"],
                alias["model"],
                ", ".join(_share(share) for share in alias["versions"]),
            ]
            for alias in aliases
        ],
    )


def _share(share: dict[str, Any]) -> str:
    name = f"v{share['version']} ({share['digest'][:12]})"
    return name if share["percent"] == 100 else f"{name} {share['percent']} %"


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


commands: list[click.Command] = [adapters_group]
