"""A TCP proxy that can lose what goes through it, as networks do."""

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

CHUNK = 65536


class _Link:
    """One connection through the proxy. While `is_black` nothing passes, and neither end is told."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.ends = {near: far, far: near}
        self.is_black = False

    def close(self) -> None:
        for end in self.ends:
            end.close()


class Proxy:
    """Forwards connections to a port of this machine, until told to lose them."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._orders: list[Callable[[], None]] = []
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._links: set[_Link] = set()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """Redis's URL through the proxy."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._order(self._stop)
        self._thread.join(10)

    def blacken(self) -> int:
        """From now on lose all that comes over the connections that exist; new ones work. Returns how many."""
        count = 0

        def blacken() -> None:
            nonlocal count
            for link in self._links:
                count += not link.is_black
                link.is_black = True

        self._order(blacken)
        return count

    def drop(self) -> None:
        """Close every connection."""

        def drop() -> None:
            for link in list(self._links):
                self._close(link)

        self._order(drop)

    def _order(self, act: Callable[[], None]) -> None:
        """Let the proxy's thread do something, and wait until it is done."""
        done = threading.Event()

        def acted() -> None:
            act()
            done.set()

        self._orders.append(acted)
        self._wake_writer.send(b"x")
        assert done.wait(10)

    def _run(self) -> None:
        while self._is_open:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_reader:
                    self._wake_reader.recv(1)
                    self._orders.pop(0)()
                elif isinstance(key.data, _Link) and key.data in self._links:
                    self._forward(key.data, key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
        except OSError:
            near.close()
            return
        link = _Link(near, far)
        self._links.add(link)
        for end in link.ends:
            self._selector.register(end, selectors.EVENT_READ, link)

    def _forward(self, link: _Link, source: socket.socket) -> None:
        try:
            raw = source.recv(CHUNK)
            if raw and not link.is_black:
                link.ends[source].sendall(raw)
        except OSError:
            raw = b""
        if not raw and link.is_black:
            # The other end does not hear of this either.
            self._selector.unregister(source)
        elif not raw:
            self._close(link)

    def _close(self, link: _Link) -> None:
        self._links.discard(link)
        for end in link.ends:
            with suppress(KeyError):
                self._selector.unregister(end)
        link.close()

    def _stop(self) -> None:
        self._is_open = False
        for link in list(self._links):
            self._close(link)
        self._selector.close()
        for own in (self._listener, self._wake_reader, self._wake_writer):
            own.close()
