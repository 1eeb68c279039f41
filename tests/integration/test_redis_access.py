"""Redis as others run it: with users that may do little, over TLS, and from Debian instead of Valkey."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from asking import request
from hosts import NEAR_ADDRESS, Network, require_namespaces
from manifests import KUBERNETES
from open_streams import MODEL, OpenStream, body, undisturbed
from servers import ROOT, FrontEnd, Valkey, free_port, wait_until
from worker_processes import Office, Start, WorkerProcess

from shared.domain import Failed
from shared.errors import StoreAwayError
from shared.queue import RequestQueue
from shared.store import check, connect

TOKENS = 100

SELDOM = {"auth", "unwatch"}
"""What a client sends to a server that knows no HELLO, and after a transaction that was not begun."""

OF_API_KEYS = {"get", "incrby", "lindex", "linsert", "ltrim", "ttl", "zrangebyscore", "zscore"}
"""What limits of keys and fairness between them need, which this does not use."""

NEWER_THAN_7 = {"client|setinfo"}
"""What redis-py asks of any server and does without."""

StartFrontEnd = Callable[..., FrontEnd]


def use_everything(front_end: FrontEnd, start: Start, office: Office, url: str) -> None:
    """Streams, whole answers, both priorities, keys, resuming, cancelling, a death and a stop."""
    doomed = start("--lease", "1", redis_url=url, model=MODEL)
    office.ready(doomed)
    carried_on = OpenStream(front_end, TOKENS).has_begun()
    doomed.kill()
    worker = start("--lease", "1", redis_url=url, model=MODEL)
    office.ready(worker)
    assert carried_on.end(30).text == undisturbed(TOKENS)

    completions = f"{front_end.url}/v1/completions"
    keyed: Any = {"json": body(8), "headers": {"Idempotency-Key": "key"}}
    first, again = (httpx.post(completions, timeout=20, **keyed).json() for _ in range(2))
    assert first == again
    assert httpx.post(completions, json=body(8, service_tier="flex"), timeout=20).status_code == 200

    with httpx.stream("POST", completions, json=body(5000, stream=True), timeout=20) as left:
        next(left.iter_lines())
        resume_url = left.headers["X-Resume-Url"]
    assert '"cancelled"' in httpx.get(front_end.url + resume_url, timeout=20).text
    assert httpx.get(f"{front_end.url}/ready", timeout=20).status_code == 200

    worker.terminate()
    assert worker.end() == 0
    assert "Traceback" not in doomed.output + worker.output


# -- users --


def users_with_one_password(folder: Path) -> Path:
    """A file with the users of deploy/redis, whose passwords are all the same."""
    text = (ROOT / "deploy" / "redis" / "users.acl").read_text()
    for user in ("OPERATOR", "API", "WORKER"):
        assert text.count(f"PASSWORD_OF_{user}") == 1
        text = text.replace(f"PASSWORD_OF_{user}", ">secret")
    users = folder / "users.acl"
    users.write_text(text)
    return users


def guarded_valkey(tmp_path: Path, address: str = "127.0.0.1") -> Valkey:
    """A server with the settings of deploy/kubernetes and those users; its own URL is the operator's."""
    port = free_port()
    users = users_with_one_password(tmp_path)
    settings = (KUBERNETES / "redis" / "redis.conf").read_text()
    for line, instead in {
        "dir /data": f"dir {tmp_path}",
        "aclfile /etc/valkey/acl/users.acl": f"aclfile {users}",
        "port 6379": f"port {port}",
        "bind * -::*": f"bind {address}",
    }.items():
        assert settings.count(f"{line}\n") == 1
        settings = settings.replace(line, instead)
    path = tmp_path / "redis.conf"
    path.write_text(settings)
    url = f"redis://operator:secret@{address}:{port}/0"
    return Valkey(tmp_path, port=port, options=("--include", str(path)), url=url)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Valkey]:
    server = guarded_valkey(tmp_path)
    server.start()
    yield server
    server.stop()


def test_the_users_of_the_cluster_s_redis_may_do_what_is_needed_and_nothing_is_left_over(
    guarded: Valkey, start_front_end: StartFrontEnd, start: Start, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    api, worker = (guarded.url.replace("operator", user) for user in ("api", "worker"))
    check(connect_to(api), api)
    front_end = start_front_end(api)

    use_everything(front_end, start, Office(connect_to(worker)), worker)
    cancel_while_queued(connect_to(api))
    assert httpx.get(f"{front_end.url}/metrics").status_code == 200

    operator: Any = connect_to(guarded.url)
    refused = {(entry["username"], entry["object"]) for entry in operator.acl_log()}
    assert refused - {(user, command) for user in ("api", "worker") for command in NEWER_THAN_7} == set()
    used = {name.removeprefix("cmdstat_") for name in operator.info("commandstats")}
    granted = {
        right.removeprefix("+") for user in ("api", "worker") for right in operator.acl_getuser(user)["commands"]
    }
    assert granted - {"-@all"} - used <= SELDOM | OF_API_KEYS


def cancel_while_queued(client: "redis.Redis") -> None:
    """A request that is cancelled while it waits."""
    queue = RequestQueue(client)
    queue.submit(request("left-while-queued"), limit=1, timeout_s=60)
    assert queue.conclude("left-while-queued", Failed("cancelled", ""))


def test_nobody_else_may_do_anything_with_the_cluster_s_redis(
    guarded: Valkey, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    probe = connect_to(guarded.url.replace("operator:secret", "probe:none"))
    assert probe.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        probe.info()
    with pytest.raises(redis.exceptions.AuthenticationError):
        connect_to(f"redis://127.0.0.1:{guarded.port}/0").ping()


def test_transactions_are_there_again_after_a_restart(
    guarded: Valkey, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    keeps_transactions(guarded, connect_to(guarded.url))


def keeps_transactions(server: Valkey, operator: "redis.Redis") -> None:
    """A Redis that reads its append-only file does so as its default user, and drops what that user may not do."""
    with operator.pipeline(transaction=True) as together:
        together.set("one", 1)
        together.set("two", 2)
        together.execute()
    server.stop()
    server.start()
    assert operator.mget("one", "two") == [b"1", b"2"]


def test_the_cluster_s_redis_lets_other_hosts_in(tmp_path: Path) -> None:
    require_namespaces()
    with Network() as network:
        with network.on(network.near):
            server = guarded_valkey(tmp_path, NEAR_ADDRESS)
            server.start()
        try:
            with network.on(network.far), connect(f"redis://worker:secret@{NEAR_ADDRESS}:{server.port}/0") as client:
                assert client.ping()
        finally:
            server.stop()


# -- TLS, with the Redis of Debian --


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a certificate of 127.0.0.1 by it, and an authority that has signed nothing."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(line: str) -> None:
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)

    for name in ("authority", "stranger"):
        openssl(f"req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {name}.key -out {name}.crt -subj /CN={name}")
    openssl("req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=redis")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = "-CA authority.crt -CAkey authority.key -CAcreateserial"
    openssl(f"x509 -req -in server.csr -days 2 -out server.crt -extfile names {signed}")
    return folder


def redis_of_debian() -> str:
    """The path of its server."""
    binary = shutil.which("redis-server")
    if binary is None:
        assert not os.environ.get("CI"), "redis-server is missing: .ci/run installs it"
        pytest.skip("redis-server is missing (on Debian and Ubuntu: apt install redis-server)")
    return binary


@pytest.fixture
def encrypted(tmp_path: Path, certificates: Path) -> Iterator[Valkey]:
    """A Redis that takes TLS only. The packaged Valkey is built without it."""
    port = free_port()
    options = (
        f"--tls-port {port} --bind 127.0.0.1 --tls-auth-clients no --tls-ca-cert-file {certificates}/authority.crt"
    )
    options += f" --tls-cert-file {certificates}/server.crt --tls-key-file {certificates}/server.key --save"
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates}/authority.crt"
    server = Valkey(tmp_path, options=(*options.split(), ""), url=url, binary=redis_of_debian())
    server.start()
    yield server
    server.stop()


def test_everything_works_over_tls(
    encrypted: Valkey, start_front_end: StartFrontEnd, start: Start, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    client = connect_to(encrypted.url)
    check(client, encrypted.url)

    use_everything(start_front_end(encrypted.url), start, Office(client), encrypted.url)


def test_a_redis_whose_certificate_nobody_trusts_is_not_used(
    encrypted: Valkey, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = encrypted.url.replace("authority", "stranger")
    with connect(url) as client, pytest.raises(StoreAwayError, match="certificate verify failed"):
        check(client, url)
    worker = WorkerProcess(url, tmp_path)
    assert worker.end() == 1
    assert len(worker.output.splitlines()) == 1
    # An authority that the machine trusts needs no mention.
    plain = encrypted.url.partition("?")[0]
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "authority.crt"))
    with connect(plain) as client:
        wait_until(lambda: client.ping(), what="an answer")
