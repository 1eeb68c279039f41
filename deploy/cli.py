"""The command line: `tokenmill up | api | worker | status`.

Nothing heavy is imported before it is needed: `--help` is quick, and `api` never imports a model library.
"""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import click
from setproctitle import setproctitle

from deploy.options import LAUNCHER_ONLY, settings_option, settings_options, unknown_variables
from shared import logs
from shared.errors import SettingsError, StartupError
from shared.settings import ApiSettings, WorkerSettings, source, variable

Settings = TypeVar("Settings", ApiSettings, WorkerSettings)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

WORKERS_DEFAULT, WORKERS_AT_LEAST, WORKERS_HELP = LAUNCHER_ONLY["workers"]
WORKER_FIELDS = {item.name: item for item in fields(WorkerSettings)}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(importlib.metadata.version("tokenmill"), prog_name="tokenmill", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve language models over the OpenAI HTTP API."""
    for name in unknown_variables(os.environ):
        warn(f"the environment variable {name} is not a setting; ignored")


@cli.command()
@settings_option(
    WORKER_FIELDS["model"],
    multiple=True,
    default=(WORKER_FIELDS["model"].default,),
    metavar="[NAME=]SPEC",
    help=f"{WORKER_FIELDS['model'].metadata['help']}; may be repeated, or hold several after spaces in the variable",
)
@click.option(
    "--workers",
    type=int,
    default=WORKERS_DEFAULT,
    show_default=True,
    envvar=variable("workers"),
    show_envvar=True,
    help=WORKERS_HELP,
)
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
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def status(redis: str | None, port: int | None, as_json: bool) -> None:
    """Show workers, slots and queues."""
    from rich.console import Console

    from deploy import status as report
    from deploy.instance import find_instance

    if redis:
        found = report.read_status(redis)
    else:
        instance = find_instance(port)
        found = report.read_status(instance.redis, url=instance.url)
    if as_json:
        click.echo(report.as_json(found))
    else:
        report.show(found, Console(markup=False, width=None if sys.stdout.isatty() else 200))


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
