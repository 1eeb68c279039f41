"""The whole examination: which checks a part needs, and the report of what they found."""

import os
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click
import msgspec

from deploy.doctor.finding import Finding, Level, examine, problem
from deploy.doctor.permissions import Role
from deploy.instance import running_instances
from deploy.models import parse_models
from deploy.options import Unusable
from shared.errors import SettingsError
from shared.settings import ApiSettings, WorkerSettings, source
from workers.models import ModelSpec, engine_of

Settings = TypeVar("Settings", ApiSettings, WorkerSettings)

MOST_WORKERS = 1024
COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@dataclass(frozen=True, kw_only=True)
class Patient:
    """What is to be examined, and what was found wrong when it was put together."""

    role: Role
    api: ApiSettings
    worker: WorkerSettings
    models: tuple[ModelSpec, ...]
    workers_each: int
    complaints: tuple[Finding, ...]


def admit(role: Role, models: tuple[str, ...], workers: Any, values: dict[str, Any]) -> Patient:
    """The patient of a command line. A bad setting is a complaint, and its default is examined instead."""
    complaints: dict[str, Finding] = {}

    def complain(text: str) -> None:
        complaints[text] = problem("settings", text, "mend the value")

    def settings(cls: type[Settings]) -> Settings:
        good = {}
        for item in fields(cls):
            value = values.get(item.name, item.default)
            if isinstance(value, Unusable):
                complain(f"{source(item.name)}: {value}")
                continue
            try:
                cls(**{item.name: value})
            except SettingsError as error:
                complain(str(error))
            else:
                good[item.name] = value
        return cls(**good)

    specs: tuple[ModelSpec, ...] = ()
    try:
        specs = parse_models(models)
    except SettingsError as error:
        complain(str(error))
    if isinstance(workers, Unusable) or not 1 <= workers <= MOST_WORKERS:
        complain(f"{source('workers')}: {workers if isinstance(workers, Unusable) else f'{workers} is out of range'}")
        workers = 1
    return Patient(
        role=role,
        api=settings(ApiSettings),
        worker=settings(WorkerSettings),
        models=specs,
        workers_each=workers if role is Role.UP else 1,
        complaints=tuple(complaints.values()),
    )


def examination(patient: Patient) -> list[Finding]:
    """All findings, in the order of the report."""
    from deploy.doctor import machine
    from deploy.doctor.models import check_models
    from deploy.doctor.store import check_store

    instance = running_instances().get(patient.api.port) if patient.role is Role.UP else None
    findings = list(patient.complaints) + examine("settings", lambda: machine.check_environment(os.environ))
    url = patient.api.redis or (instance.redis if instance else "")
    if url:
        roles = tuple(role for role in (Role.API, Role.WORKER) if patient.role in (Role.UP, role))
        findings += examine("redis", lambda: check_store(url, roles))
    elif patient.role is Role.UP:
        findings += examine("redis", machine.check_embedded_redis)
    else:
        findings.append(problem("redis", f"{source('redis')} is missing", "only `tokenmill up` starts its own"))
    if patient.role is not Role.API:
        findings += check_models(
            patient.models, patient.worker, workers_each=patient.workers_each, are_loaded=instance is not None
        )
        findings += examine("cores", lambda: machine.check_cores(*_threads(patient)))
        if patient.worker.metrics_port and instance is None:
            workers = max(1, len(patient.models)) * patient.workers_each
            findings += examine("metrics port", lambda: machine.check_metrics_ports(patient.worker, workers))
    if patient.role is not Role.WORKER:
        findings += examine("port", lambda: machine.check_port(patient.api, is_ours=instance is not None))
        findings += examine("open files", lambda: machine.check_open_files(patient.api.connections))
    return findings


def _threads(patient: Patient) -> tuple[int, int]:
    """Threads of each worker that computes, and how many such workers there are; as the launcher divides them."""
    everyone = max(1, len(patient.models) * patient.workers_each)
    computing = sum(engine_of(model.location) != "fake" for model in patient.models) * patient.workers_each
    return patient.worker.threads or max(1, (os.cpu_count() or 1) // everyone), computing


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing is a problem."""
    return all(finding.level is not Level.PROBLEM for finding in findings)


def as_json(findings: list[Finding]) -> str:
    """The report as one JSON object, indented."""
    report = {"ok": is_healthy(findings), "findings": findings}
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def show(findings: list[Finding]) -> None:
    """Print the report: a line for each finding, and how many of them matter."""
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        level = click.style(f"{finding.level.value:<8}", fg=COLOURS[finding.level])
        advice = f"; {finding.advice}" if finding.advice else ""
        click.echo(f"{level} {finding.check:<{width}}  {finding.message.rstrip('.')}{advice}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    click.echo(f"\n{_count(counts[Level.PROBLEM], 'problem')}, {_count(counts[Level.WARNING], 'warning')}")


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
