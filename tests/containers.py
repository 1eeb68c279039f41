"""The containers of docker-compose.yml, started and looked at by the command lines of Docker."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
from servers import ROOT, free_port, wait_until

START_LIMIT_S = 90.0
PAUSE_S = 0.2
"""Between two questions to the engine, each of which starts a process."""


def compose_command() -> list[str]:
    """Compose 1.29, or Docker's own plugin where that is all there is."""
    return ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]


def eventually(condition: Callable[[], Any], what: str, limit_s: float) -> Any:
    """As `wait_until`, for what is asked of the engine."""
    return wait_until(condition, limit_s=limit_s, what=what, pause_s=PAUSE_S)


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


class Stack:
    """One project: its services, each with any number of containers."""

    def __init__(self, project: str, *overlays: str, **settings: str) -> None:
        self.project = project
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENMILL_", "REDIS_"))}
        self._environment = kept | {
            "COMPOSE_PROJECT_NAME": project,
            "COMPOSE_FILE": ":".join(str(ROOT / path) for path in ("docker-compose.yml", *overlays)),
            "TOKENMILL_PORT": str(self.port),
            **settings,
        }

    def run(self, *command: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        """A command about this project, with settings of its own."""
        environment = self._environment | settings
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def compose(self, *arguments: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        """A command of Compose; an `.env` of this machine is not read."""
        return self.run(*compose_command(), "--env-file=.env.example", *arguments, check=check, **settings)

    def containers(self, service: str, *, all: bool = False) -> list[str]:
        """The ids of a service's running containers, the newest first; with `all` also of stopped ones."""
        labels = {"project": self.project, "service": service}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        return docker("ps", "--quiet", "--no-trunc", *(["--all"] if all else []), *filters).stdout.split()

    def scale(self, service: str, count: int) -> None:
        """Change the number of a service's containers, and nothing else; wait until they are well."""
        self.compose("up", "--detach", "--no-deps", "--no-recreate", "--scale", f"{service}={count}", service)
        self.healthy(service, count)

    def healthy(self, service: str, count: int = 1) -> list[str]:
        """Wait until so many containers of the service run, all of them well; their ids."""

        def look() -> list[str] | None:
            found = self.containers(service)
            well = len(found) == count and all(state(each)["Health"]["Status"] == "healthy" for each in found)
            return found if well else None

        found: list[str] = eventually(look, f"{count} healthy containers of {service}", START_LIMIT_S)
        return found

    def answers(self) -> bool:
        """Whether requests would be answered."""
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def status(self) -> Any:
        """What `tokenmill status` says, in a front end's container."""
        # Compose itself would look for the service's first container, which may have been replaced.
        front_end, *_ = self.containers("api")
        return json.loads(docker("exec", front_end, "entrypoint", "status", "--json").stdout)

    def redis(self, *command: str) -> str:
        """A command of Redis, as the user who may do everything."""
        return self.compose("exec", "-T", "redis", "redis-operator", *command).stdout

    def down(self) -> None:
        """Remove everything, volumes included."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=1")


def state(container: str) -> Any:
    """What the engine knows of a container's process and health."""
    return inspect(container)["State"]


def inspect(container: str) -> Any:
    return json.loads(docker("inspect", container).stdout)[0]


def logs(container: str) -> str:
    """Everything that a container has printed."""
    done = docker("logs", container)
    return done.stdout + done.stderr


def crash(container: str) -> None:
    """SIGKILL its first process, as the kernel does it: to the engine it has died, and not been stopped."""
    os.kill(state(container)["Pid"], signal.SIGKILL)
