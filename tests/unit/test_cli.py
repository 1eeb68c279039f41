"""The command line: settings as flags and variables, and errors that are one line."""

import subprocess
import sys
from dataclasses import fields

import pytest

from deploy.cli import main
from shared.settings import ApiSettings, WorkerSettings, flag, variable


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (ApiSettings, WorkerSettings):
        for item in fields(cls):
            monkeypatch.delenv(variable(item.name), raising=False)


def one_line(text: str) -> str:
    """The only line of the text."""
    assert text.count("\n") == 1, text
    assert text.endswith("\n"), text
    return text[:-1]


@pytest.mark.parametrize(("command", "cls"), [("api", ApiSettings), ("worker", WorkerSettings)])
def test_help_lists_each_setting_with_flag_and_variable(
    command: str, cls: type, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    for item in fields(cls):
        assert flag(item.name) in words
        assert any(variable(item.name) in word for word in words)


def test_up_takes_the_settings_of_front_end_and_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--help"]) == 0
    words = capsys.readouterr().out.split()
    for item in (*fields(ApiSettings), *fields(WorkerSettings)):
        assert words.count(flag(item.name)) == 1
    assert "--workers" in words


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "tokenmill 0.1.0\n"


BAD_VALUES = [
    ("api", "port", "eighty", "'eighty' is not a valid integer"),
    ("api", "port", "65536", "65536 is above 65535"),
    ("api", "keep_alive", "0", "0.0 is below 0.1"),
    ("api", "request_timeout", "inf", "inf is not a number that can be used"),
    ("api", "request_timeout", "1e300", "1e+300 is above 86400"),
    ("api", "connections", "99999999999999999999", "99999999999999999999 is above 1000000"),
    ("api", "otlp_endpoint", "nonsense", "'nonsense' is not an http:// or https:// URL"),
    ("worker", "lease", "nan", "nan is not a number that can be used"),
    ("worker", "drain_timeout", "inf", "inf is not a number that can be used"),
    ("worker", "backend", "abacus", "'abacus' is not one of"),
    ("up", "slots", "0", "0 is below 1"),
    ("up", "workers", "0", "0 is below 1"),
    ("up", "model", "=fake:", "'=fake:' is not NAME=SPEC"),
]


@pytest.mark.parametrize(("command", "name", "value", "complaint"), BAD_VALUES)
def test_a_bad_flag_is_one_line_that_names_flag_and_variable(
    command: str, name: str, value: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, flag(name), value]) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith(f"tokenmill: error: {flag(name)} ({variable(name)}): {complaint}")


@pytest.mark.parametrize(("command", "name", "value", "complaint"), BAD_VALUES)
def test_a_bad_variable_is_one_line_that_names_flag_and_variable(
    command: str,
    name: str,
    value: str,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable(name), value)
    assert main([command]) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith(f"tokenmill: error: {flag(name)} ({variable(name)}): {complaint}")


def test_a_flag_wins_over_its_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_SLOTS", "1")
    assert main(["worker", "--slots", "0"]) == 2
    assert "0 is below 1" in capsys.readouterr().err


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["api", "--slots", "3"]) == 2
    assert "--slots" in one_line(capsys.readouterr().err)


def test_an_unknown_variable_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_SLOTZ", "3")
    main(["status", "--redis", "nonsense"])
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "tokenmill: warning: the environment variable TOKENMILL_SLOTZ is not a setting; ignored"
    assert error.startswith("tokenmill: error: redis URL 'nonsense' cannot be used")


@pytest.mark.parametrize("command", ["api", "worker"])
def test_a_part_alone_needs_a_redis(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert "--redis (TOKENMILL_REDIS) is missing" in one_line(capsys.readouterr().err)


def test_the_variable_for_models_holds_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_MODEL", "one=fake: two=fake: one=fake:")
    assert main(["up"]) == 2
    assert "two models are named 'one'" in one_line(capsys.readouterr().err)


def test_an_unreachable_redis_is_one_line_without_the_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--redis", "redis://:secret@127.0.0.1:1/0"]) == 1
    line = one_line(capsys.readouterr().err)
    assert line.startswith("tokenmill: error: cannot reach Redis at redis://:***@127.0.0.1:1/0")
    assert "secret" not in line


def test_help_imports_nothing_heavy() -> None:
    heavy = "torch transformers llama_cpp numpy flask gevent redis rich"
    code = (
        "import sys, deploy.cli; assert deploy.cli.main(['up', '--help']) == 0;"
        f"sys.exit(', '.join(name for name in '{heavy}'.split() if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
