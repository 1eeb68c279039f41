"""Traces are off, and nothing that they need has to be there, unless they are asked for."""

import subprocess
import sys

import pytest
from servers import ROOT

WITHOUT_OPENTELEMETRY = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Missing())
"""

MAIN = (
    WITHOUT_OPENTELEMETRY
    + """
from deploy.cli import main

sys.exit(main(sys.argv[1:]))
"""
)


def python(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [("worker", "--model", "fake:"), ("api", "--port", "0")], ids=["worker", "api"])
def test_an_endpoint_without_opentelemetry_is_one_line(arguments: tuple[str, ...]) -> None:
    done = python(MAIN, *arguments, "--redis", "redis://127.0.0.1:1", "--otlp-endpoint", "http://127.0.0.1:1")

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--otlp-endpoint (TOKENMILL_OTLP_ENDPOINT) needs OpenTelemetry" in done.stderr
    assert "tokenmill[otlp]" in done.stderr


def test_without_an_endpoint_opentelemetry_need_not_be_there() -> None:
    done = python(WITHOUT_OPENTELEMETRY + "import api.app, api.metrics, workers.main")

    assert done.returncode == 0, done.stderr


def test_without_an_endpoint_no_exporter_is_imported() -> None:
    done = python("import sys, api.app, api.metrics, workers.main; print('opentelemetry.exporter' in sys.modules)")

    assert done.stdout == "False\n", done.stderr


def test_the_master_of_a_front_end_imports_nothing_that_must_see_gevent_s_sockets() -> None:
    done = python(
        "import sys, api.server\n"
        "print([name for name in ('prometheus_client', 'redis', 'flask', 'opentelemetry') if name in sys.modules])"
    )

    assert done.stdout == "[]\n", done.stderr
