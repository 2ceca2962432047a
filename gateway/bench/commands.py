"""`loragate bench serve`: an open or a closed loop of requests on an OpenAI-compatible server."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway import __version__
from gateway.bench.options import Finite, JsonObject, Lengths, Prefix
from gateway.bench.plan import Limit, Plan
from gateway.bench.redaction import hiding
from gateway.bench.shape import Endpoint, Range, Shape, SharedPrefix
from gateway.bench.targets import Target, TargetsError, check_extra, check_key, read_targets
from gateway.demo.progress import Status

if TYPE_CHECKING:
    from gateway.bench.runner import Result

SECONDS = Finite(min=0, min_open=True)
INTERRUPTED = 130
"""Exit status, as of any program that Ctrl-C ended."""


@click.group("bench")
def bench_group() -> None:
    """Measure a server."""


@bench_group.command("serve")
@click.option(
    "--url",
    default="http://127.0.0.1:8080/v1",
    show_default=True,
    help="Of the API, as SDKs want it.",
)
@click.option("--api-key", envvar="LORAGATE_API_KEY", default="", help="Or set LORAGATE_API_KEY.")
@click.option("--model", "models", multiple=True, metavar="ID", help="Repeat for several.")
@click.option(
    "--models",
    "models_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON Lines: {"model": "name", "extra": {…}, "api_key": "…"}; the last two are optional.',
)
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="Completions are sent token ids; chat is sent as many words, about a token each.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    metavar="C",
    help="Closed loop: C clients send their next request when the last one ended.",
)
@click.option(
    "--rate",
    type=SECONDS,
    metavar="R",
    help="Open loop: R requests a second on average, whatever became of those before.",
)
@click.option(
    "--cv",
    type=SECONDS,
    default=1.0,
    show_default=True,
    help="Coefficient of variation of the times between arrivals: 1 is a Poisson process.",
)
@click.option("--requests", "count", type=click.IntRange(1), metavar="N", help="End after N.")
@click.option(
    "--duration",
    type=SECONDS,
    metavar="S",
    help="End after S seconds. A closed loop cuts off what then runs and counts what had arrived; "
    "an open loop sends no more, and waits.",
)
@click.option("--prompt-tokens", type=Lengths(1), default="64:256", show_default=True)
@click.option("--output-tokens", type=Lengths(1), default="32:128", show_default=True)
@click.option(
    "--alpha",
    type=Finite(min=0),
    default=1.0,
    show_default=True,
    help="The r-th model is asked with probability ∝ r^-alpha; 0: all alike.",
)
@click.option(
    "--shared-prefix", type=Prefix(), help="All prompts of a group begin with the same TOKENS."
)
@click.option(
    "--vocab",
    type=Lengths(0),
    default="1000:30000",
    show_default=True,
    help="Token ids that prompts are made of.",
)
@click.option(
    "--extra",
    type=JsonObject(),
    default='{"ignore_eos": true, "temperature": 0}',
    show_default=True,
    help="Merged into each body; null leaves a field out.",
)
@click.option("--slo-ttft", type=SECONDS, default=6.0, show_default=True, help="Seconds.")
@click.option("--slo-inter-token", type=SECONDS, default=0.2, show_default=True, help="Seconds.")
@click.option("--timeout", type=SECONDS, default=300.0, show_default=True, help="Of one request.")
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Requests before the measured ones.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The same one makes the same requests. For a second run on a server that caches prompts, "
    "take another.",
)
@click.option(
    "--pid",
    "pids",
    type=click.IntRange(1),
    multiple=True,
    help="A server process here: its memory and CPU, and its children's. Repeat for several.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the report to this file.",
)
@click.option(
    "--plots",
    "plots_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw PNG files into this folder.",
)
@click.option("--quiet", is_flag=True, help="Print no table and no progress.")
def bench_serve(
    url: str,
    api_key: str,
    models: tuple[str, ...],
    models_file: Path | None,
    endpoint: Endpoint,
    concurrency: int | None,
    rate: float | None,
    cv: float,
    count: int | None,
    duration: float | None,
    prompt_tokens: Range,
    output_tokens: Range,
    alpha: float,
    shared_prefix: SharedPrefix | None,
    vocab: Range,
    extra: dict[str, Any],
    slo_ttft: float,
    slo_inter_token: float,
    timeout: float,
    warmup: int,
    seed: int,
    pids: tuple[int, ...],
    json_file: Path | None,
    plots_folder: Path | None,
    quiet: bool,
) -> None:
    """Load an OpenAI-compatible server, and measure what its clients get.

    Requests are streamed. Time to first token goes from sending to the first chunk with text;
    inter-token latency is the time between such chunks, however many tokens one carries; time per
    output token divides the time from the first text to the end by the tokens that came in it.
    """
    _check_one("--concurrency", concurrency, "--rate", rate)
    _check_one("--requests", count, "--duration", duration)
    if shared_prefix is not None and shared_prefix.tokens >= prompt_tokens.low:
        raise click.UsageError(
            f"--shared-prefix {shared_prefix.tokens}:{shared_prefix.groups} leaves nothing else of "
            f"a prompt of {prompt_tokens.low} tokens: --prompt-tokens must begin above it."
        )
    targets = _targets(models, models_file, api_key, extra)
    _check_outputs(json_file, plots_folder)
    plan = Plan(
        url=url,
        shape=Shape(
            endpoint=endpoint,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            vocabulary=vocab,
            alpha=alpha,
            shared_prefix=shared_prefix,
            extra=extra,
        ),
        concurrency=concurrency,
        rate=rate,
        cv=cv,
        limit=Limit(count, duration),
        warmup=warmup,
        seed=seed,
        timeout_s=timeout,
        slo_ttft_s=slo_ttft,
        slo_inter_token_s=slo_inter_token,
        pids=pids,
    )
    redact = hiding([api_key, *(target.api_key for target in targets)])
    result = _measure(plan, targets, api_key, redact, quiet)
    _show(plan, targets, result, redact, json_file, plots_folder, quiet)
    if result.run.interrupted:
        sys.exit(INTERRUPTED)
    if result.figures.requests.failed == result.figures.requests.sent:
        sys.exit(1)


commands: list[click.Command] = [bench_group]


def _check_one(name: str, value: object, other_name: str, other: object) -> None:
    if (value is None) == (other is None):
        raise click.UsageError(f"Give one of {name} and {other_name}.")


def _targets(
    models: tuple[str, ...], file: Path | None, api_key: str, extra: dict[str, Any]
) -> list[Target]:
    if bool(models) == (file is not None):
        raise click.UsageError("Give the models by --model, or by --models FILE.")
    if not all(models):
        raise click.UsageError("--model: the name is empty.")
    try:
        check_key(api_key, "--api-key")
        check_extra(extra, "--extra")
        return [Target(model) for model in models] if file is None else read_targets(file)
    except TargetsError as error:
        raise click.UsageError(str(error)) from None


def _check_outputs(json_file: Path | None, plots_folder: Path | None) -> None:
    """Before the run, whose results would be lost."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise click.UsageError(f"--json: there is no folder {json_file.absolute().parent}.")
    if plots_folder is not None:
        from gateway.bench import plots  # numpy is slow to load

        if not plots.available():
            raise click.ClickException("--plots needs matplotlib: pip install 'loragate[bench]'")
        try:
            plots_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.UsageError(f"--plots: {plots_folder}: {error.strerror}.") from None


def _measure(
    plan: Plan, targets: list[Target], api_key: str, redact: Callable[[str], str], quiet: bool
) -> "Result":
    import uvloop

    from gateway.bench.client import AddressError
    from gateway.bench.processes import ProcessesError
    from gateway.bench.runner import WarmUpFailed, measure

    try:
        with _progress(quiet) as progress:
            result = uvloop.run(measure(plan, targets, api_key, redact, progress))
    except AddressError as error:
        raise click.UsageError(f"--url {redact(plan.url)}: {error}") from None
    except ProcessesError as error:
        raise click.UsageError(f"--pid: {error}") from None
    except WarmUpFailed as error:
        raise click.ClickException(
            f"Every warm-up request failed, so nothing was measured. {error}"
        ) from None
    if result is None:
        click.echo("Stopped while warming up; nothing was measured.", err=True)
        sys.exit(INTERRUPTED)
    return result


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line that is rewritten, where there is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    with Status("Measuring", sys.stderr) as status:
        yield status.show


def _show(
    plan: Plan,
    targets: list[Target],
    result: "Result",
    redact: Callable[[str], str],
    json_file: Path | None,
    plots_folder: Path | None,
    quiet: bool,
) -> None:
    from gateway.bench import plots, report

    if json_file is not None:
        settings = {"version": __version__, **msgspec.to_builtins(plan)}
        settings["models"] = [{"model": one.model, "extra": one.extra} for one in targets]
        text = json.dumps(report.as_dict(settings, result), indent=2, ensure_ascii=False)
        json_file.write_text(redact(text) + "\n", encoding="utf-8")
    if not quiet:
        click.echo(redact(report.table(result)))
    if plots_folder is not None:
        for path in plots.draw(result.run, result.figures, plots_folder):
            if not quiet:
                click.echo(f"drawn: {path}")
