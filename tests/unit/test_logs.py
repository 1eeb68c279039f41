"""How a message is logged."""

import json
import subprocess
import sys

from servers import ROOT

PROGRAM = """
import logging, sys
from shared import logs
logs.configure(level="info", format=sys.argv[1])
logger = logging.getLogger("tokenmill.test")
logger.debug("not this")
logger.info("request %s: two\\nlines", "r", extra=logs.about("r") | {"seconds": 1.5, "code": None})
try:
    raise ValueError("no")
except ValueError:
    logger.exception("it broke")
logging.getLogger("a.library").warning("from elsewhere")
"""


def logged(format: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, format], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_json_is_one_object_a_line_with_the_request_it_is_about() -> None:
    first, second, third = map(json.loads, logged("json").splitlines())

    assert first["message"] == "request r: two\nlines"
    assert (first["level"], first["logger"], first["request_id"]) == ("INFO", "tokenmill.test", "r")
    assert (first["seconds"], first["code"]) == (1.5, None)
    assert first["time"].endswith("Z")
    assert isinstance(first["pid"], int)
    assert second["level"] == "ERROR"
    assert second["exc_info"].endswith("ValueError: no")
    assert "request_id" not in second
    assert (third["logger"], third["message"]) == ("a.library", "from elsewhere")


def test_text_is_for_people() -> None:
    output = logged("text")

    assert "INFO tokenmill.test [" in output
    # Nobody can write a line of their own into the log.
    assert "request r: two\\nlines\n" in output
    assert "ValueError: no" in output
    assert "not this" not in output
