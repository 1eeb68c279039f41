"""`tokenmill doctor` before real servers."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from launched import Up
from redis_sets import RedisSet
from servers import Valkey, free_port

from deploy.doctor.permissions import RULES

FAKE = ("--model", "tiny=fake:", "--port", "0")

Connect = Callable[[str], "redis.Redis"]


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., dict[str, list[dict[str, str]]]]:
    """Runs the doctor with these arguments; gives its findings by check. The exit status is that of the findings."""

    def run(*arguments: str) -> dict[str, list[dict[str, str]]]:
        command = [sys.executable, "-P", "-m", "deploy.cli", "doctor", "--json", *FAKE, *arguments]
        environment = Up.environment_for(tmp_path)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        found: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(done.stdout)["findings"]:
            found.setdefault(finding["check"], []).append(finding)
        assert done.returncode == any(line["level"] == "problem" for lines in found.values() for line in lines)
        return found

    return run


Examine = Callable[..., dict[str, list[dict[str, str]]]]


def levels(found: dict[str, list[dict[str, str]]], level: str) -> set[str]:
    """The checks that found something of this level."""
    return {check for check, lines in found.items() for line in lines if line["level"] == level}


@pytest.fixture
def guarded(own_durable_valkey: Valkey, connect_to: Connect) -> Callable[[str], str]:
    """The URL of a user of the server who has these rights."""

    def url(rules: str) -> str:
        admin = connect_to(own_durable_valkey.url)
        admin.execute_command("ACL", "SETUSER", "mill", "reset", "on", ">secret", *rules.split())
        return own_durable_valkey.url.replace("unix://", "unix://mill:secret@")

    return url


def test_a_redis_that_is_as_it_should_be_has_no_problem_and_is_left_as_it_was(
    own_durable_valkey: Valkey, examine: Examine, connect_to: Connect
) -> None:
    client = connect_to(own_durable_valkey.url)
    client.set("tokenmill:doctor", "somebody's", ex=600)
    before: Any = client.info("persistence")["rdb_changes_since_last_save"]

    found = examine("--redis", own_durable_valkey.url)

    assert levels(found, "problem") == set()
    assert levels(found, "warning") <= {"open files"}
    assert {"redis", "redis front end", "redis worker", "redis writes"} <= levels(found, "ok")
    after: Any = client.info("persistence")["rdb_changes_since_last_save"]
    assert after == before
    assert client.keys("*") == [b"tokenmill:doctor"]


def test_a_redis_that_is_not_fit_is_told_in_all_its_faults(
    own_valkey: Valkey, examine: Examine, connect_to: Connect
) -> None:
    client = connect_to(own_valkey.url)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("min-replicas-to-write", 2)
    client.config_set("client-output-buffer-limit", "pubsub 1mb 1mb 60")

    found = examine("--redis", own_valkey.url)

    assert levels(found, "problem") == {"redis eviction", "redis writes"}
    assert {"redis persistence", "redis output buffer"} <= levels(found, "warning")
    assert "Not enough good replicas" in found["redis writes"][0]["message"]


def test_a_redis_that_is_full_takes_no_writes_and_its_user_may_still_do_everything(
    own_valkey: Valkey, examine: Examine, connect_to: Connect
) -> None:
    connect_to(own_valkey.url).config_set("maxmemory", 1)

    found = examine("--redis", own_valkey.url)

    assert levels(found, "problem") == {"redis writes"}
    assert "redis memory" in levels(found, "warning")
    assert {"redis front end", "redis worker"} <= levels(found, "ok")


def test_the_rights_that_the_doctor_advises_are_enough_for_it(guarded: Callable[[str], str], examine: Examine) -> None:
    found = examine("--redis", guarded(RULES))

    assert levels(found, "problem") == set()
    assert found["redis worker"][0]["message"] == "user mill may do what a worker does"


@pytest.mark.parametrize(
    ("rules", "problems", "named"),
    [
        (f"{RULES} -blmove", {"redis worker"}, ["BLMOVE rq:*"]),
        (f"{RULES} -rpush -llen", {"redis front end"}, ["RPUSH rq:*", "LLEN rq:*"]),
        (f"{RULES} -xadd", {"redis front end", "redis worker"}, ["XADD tokenmill:*"]),
        (RULES.replace("~rq:*", ""), {"redis front end", "redis worker"}, ["DEL rq:*", "EXISTS rq:*", "more"]),
        (
            RULES.replace("&tokenmill:*", ""),
            {"redis front end", "redis worker"},
            ["PUBLISH on channel tokenmill:events:*"],
        ),
    ],
)
def test_a_user_who_may_not_do_something_is_told_what(
    guarded: Callable[[str], str], examine: Examine, rules: str, problems: set[str], named: list[str]
) -> None:
    found = examine("--redis", guarded(rules))

    assert levels(found, "problem") == problems
    for check in problems:
        message, advice = found[check][0]["message"], found[check][0]["advice"]
        assert message.startswith("user mill may not ")
        assert [name for name in named if name not in message] == []
        assert advice == f"give it {RULES}"


def test_a_user_who_may_not_ask_is_looked_at_as_far_as_that_goes(
    guarded: Callable[[str], str], examine: Examine
) -> None:
    found = examine("--redis", guarded(f"{RULES} -info"))

    assert levels(found, "problem") == set()
    assert "redis info" in levels(found, "warning")
    assert {"redis", "redis writes", "redis front end", "redis worker"} <= levels(found, "ok")


def test_a_redis_that_is_not_there_is_one_problem_beside_all_other_findings(examine: Examine) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"

    found = examine("--redis", url)

    assert levels(found, "problem") == {"redis"}
    assert "secret" not in found["redis"][0]["message"]
    assert {"model tiny", "port", "open files"} <= set(found)


def test_a_wrong_password_is_told_as_that(guarded: Callable[[str], str], examine: Examine) -> None:
    found = examine("--redis", guarded(RULES).replace("secret", "guessed"))

    assert levels(found, "problem") == {"redis"}
    assert "does not let us in" in found["redis"][0]["message"]
    assert "guessed" not in found["redis"][0]["message"]


@pytest.fixture
def redis_set(tmp_path: Path) -> Iterator[RedisSet]:
    folder = tmp_path / "set"
    folder.mkdir()
    with RedisSet(folder) as found:
        yield found


def test_a_primary_behind_sentinel_is_examined_and_a_replica_is_no_place_for_requests(
    redis_set: RedisSet, examine: Examine
) -> None:
    behind = examine("--redis", redis_set.url)
    replica = examine("--redis", redis_set.replica.url)

    assert levels(behind, "problem") == set()
    assert "min-replicas-to-write" in behind["redis replicas"][0]["advice"]
    assert levels(replica, "problem") == {"redis replicas", "redis writes"}


def test_an_up_that_runs_here_is_examined_with_its_redis(examine: Examine, tmp_path: Path) -> None:
    up = Up(tmp_path, "--model", "tiny=fake:")
    try:
        port = up.ready().url.rpartition(":")[2]
        found = examine("--port", port)
    finally:
        up.clean()

    assert levels(found, "problem") == set()
    assert found["redis"][0]["message"].startswith("unix://")
    assert found["port"][0]["message"].startswith("a `tokenmill up` of yours serves")
