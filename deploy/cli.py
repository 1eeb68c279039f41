"""The command line: `tokenmill up | api | worker | status | doctor`.

Nothing heavy is imported before it is needed: `--help` is quick, and `api` never imports a model library.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import click
from setproctitle import setproctitle

from deploy.options import LAUNCHER_ONLY, Command, Lenient, settings_option, settings_options, unknown_variables
from shared import logs
from shared.errors import SettingsError, StartupError
from shared.settings import ApiSettings, WorkerSettings, source, variable

Settings = TypeVar("Settings", ApiSettings, WorkerSettings)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

PARTS = ("up", "api", "worker")
WATCH_S = 2.0
ANSWER_LIMIT_S = 3.0
"""How long `status` waits for one answer of Redis; the servers are more patient."""

PIPED_WIDTH = 200
"""How wide tables are where nobody looks at a terminal."""

WORKERS_DEFAULT, WORKERS_AT_LEAST, WORKERS_HELP = LAUNCHER_ONLY["workers"]
WORKER_FIELDS = {item.name: item for item in fields(WorkerSettings)}


models_option = settings_option(
    WORKER_FIELDS["model"],
    multiple=True,
    default=(WORKER_FIELDS["model"].default,),
    metavar="[NAME=]SPEC",
    help=f"{WORKER_FIELDS['model'].metadata['help']}; may be repeated, or hold several after spaces in the variable",
)


def workers_option(kind: Any) -> Callable[[Command], Command]:
    """The option for how many workers each model has."""
    return click.option(
        "--workers",
        type=kind,
        default=WORKERS_DEFAULT,
        show_default=True,
        envvar=variable("workers"),
        show_envvar=True,
        help=WORKERS_HELP,
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(importlib.metadata.version("tokenmill"), prog_name="tokenmill", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve language models over the OpenAI HTTP API."""
    if context.invoked_subcommand == doctor.name:
        return  # it has a line for each of them
    for name in unknown_variables(os.environ):
        warn(f"the environment variable {name} is not a setting; ignored")


@cli.command()
@models_option
@workers_option(int)
@settings_options(ApiSettings, WorkerSettings, leave_out=("model",))
def up(model: tuple[str, ...], workers: int, **values: Any) -> None:
    """Run everything on this machine: Redis, the front end and the workers."""
    from deploy.launcher import Plan, launch
    from deploy.models import parse_models

    if workers < WORKERS_AT_LEAST:
        raise SettingsError(f"{source('workers')}: {workers} is below {WORKERS_AT_LEAST}")
    plan = Plan(
        api=_settings(ApiSettings, values),
        worker=_settings(WorkerSettings, values),
        models=parse_models(model),
        workers_per_model=workers,
    )
    setproctitle("tokenmill up")
    launch(plan, say)


@cli.command()
@settings_options(ApiSettings)
def api(**values: Any) -> None:
    """Run a front end."""
    settings = _settings(ApiSettings, values)
    _require_redis(settings.redis)
    setproctitle("tokenmill api")
    from api.server import serve

    serve(settings)


@cli.command()
@settings_options(WorkerSettings)
def worker(model: str, **values: Any) -> int:
    """Run one worker, which serves one model."""
    from workers.models import parse_model

    settings = _settings(WorkerSettings, values | {"model": model})
    _require_redis(settings.redis)
    setproctitle(f"tokenmill worker {parse_model(model).name}")
    logs.configure(level=settings.log_level, format=settings.log_format)
    from workers.main import run

    return run(settings)


@cli.command()
@click.option(
    "--redis", envvar=variable("redis"), show_envvar=True, help="URL of Redis; without it, of the `up` that runs here"
)
@click.option("--port", type=int, help="port of the `up` to look at, if several run here")
@click.option(
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=WATCH_S,
    metavar="[SECONDS]",
    help=f"show it again each so many seconds, {WATCH_S:g} if not given, until Ctrl-C",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON; with --watch, one object a line")
def status(redis: str | None, port: int | None, watch: float | None, as_json: bool) -> None:
    """Show workers, slots, queues, speed and latencies."""
    from rich.console import Console

    from deploy import status as report
    from deploy.instance import find_instance
    from deploy.watch import watch as keep_watching
    from shared.store import check, connect

    instance = None if redis else find_instance(port)
    redis_url, url = (instance.redis, instance.url) if instance else (redis or "", "")
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    with connect(redis_url, socket_timeout_s=ANSWER_LIMIT_S) as client:
        check(client, redis_url)
        if watch is not None:
            keep_watching(
                lambda: report.read_status(client, redis_url, url=url), console, interval_s=watch, as_json=as_json
            )
            return
        found = report.read_status(client, redis_url, url=url)
    if as_json:
        click.echo(report.as_json(found))
    else:
        console.print(report.StatusView(found))


@cli.command()
@click.argument("part", type=click.Choice(PARTS), default=PARTS[0])
@models_option
@workers_option(Lenient(click.INT))
@settings_options(ApiSettings, WorkerSettings, leave_out=("model",), is_lenient=True)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def doctor(part: str, model: tuple[str, ...], workers: Any, as_json: bool, **values: Any) -> int:
    """Look at all that `up`, `api` or `worker` would need with these settings, and change nothing.

    Exits with 1 if something is a problem.
    """
    from deploy.doctor import examination as report
    from deploy.doctor.permissions import Role

    findings = report.examination(report.admit(Role(part), model, workers, values))
    if as_json:
        click.echo(report.as_json(findings))
    else:
        report.show(findings)
    return 0 if report.is_healthy(findings) else EXIT_FAILED


def _settings(cls: type[Settings], values: dict[str, Any]) -> Settings:
    """The settings of one kind out of the values of all options."""
    return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})


def _require_redis(url: str) -> None:
    if not url:
        raise SettingsError(f"{source('redis')} is missing; only `tokenmill up` starts a Redis of its own")


def say(line: str) -> None:
    """Print a line for whoever watches, if somebody still does."""
    try:
        print(line, flush=True)
    except OSError:
        # `up | head`: the reader has gone. Serving and stopping in order matter more than the line.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def warn(message: str) -> None:
    """Print a one-line warning."""
    click.echo(f"tokenmill: warning: {_one_line(message)}", err=True)


def fail(message: str) -> None:
    """Print a one-line error."""
    click.echo(f"tokenmill: error: {_one_line(message)}", err=True)


def _one_line(message: str) -> str:
    return " ".join(message.split())


@cli.command()
@click.argument("name")
def key(name: str) -> None:
    """Make an API key, and show it this once beside what goes into the file of --api-keys."""
    from api.access.keys import check_name, new_key

    check_name(name)
    made, hashed = new_key()
    click.echo(f'{made}\n\n[[key]]\nname = "{name}"\nhash = "{hashed}"')


def _usage_message(error: click.ClickException) -> str:
    """What is wrong with the command line, naming both the flag and the variable of a bad value."""
    parameter = getattr(error, "param", None)
    if isinstance(error, click.BadParameter) and parameter is not None and parameter.envvar:
        return f"{source(parameter.name)}: {error.message.rstrip('.')}"
    return error.format_message()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; errors are one line."""
    try:
        result = cli.main(arguments, prog_name="tokenmill", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return EXIT_USAGE
    except click.ClickException as error:
        fail(_usage_message(error))
        return EXIT_USAGE
    except SettingsError as error:
        fail(str(error))
        return EXIT_USAGE
    except StartupError as error:
        fail(str(error))
        return EXIT_FAILED
    except click.Abort:
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
