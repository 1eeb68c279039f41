"""API keys: who holds one, what each may do, and the file or variable that says so.

Only hashes are kept. A key is 256 random bits, so one round of SHA-256 is enough: there is no dictionary to try, as
there is for a password that somebody chose.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import SettingsError
from shared.settings import ApiSettings, source

KEY_PREFIX = "tm-"
HASH_PREFIX = "sha256:"

LOOK_EVERY_S = 1.0
"""How old what is known of the file may be."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")

logger = logging.getLogger("tokenmill.keys")


class Allowance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much a key may ask for; 0 is no limit."""

    requests: int = 0
    """Requests a minute."""
    tokens: int = 0
    """Tokens of prompts and answers a minute."""
    concurrent: int = 0
    """Requests that are queued or running."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One holder. `digest` is the SHA-256 of the key, 32 bytes."""

    name: str
    digest: bytes
    allowance: Allowance


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    hash: str
    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    key: list[_Entry] = []


def new_key() -> tuple[str, str]:
    """A new key, and the hash of it that goes into the file."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, HASH_PREFIX + _digest(key).hex()


def check_name(name: str) -> None:
    """See whether a holder may be called so.

    Raises:
        SettingsError: it may not.
    """
    if not _NAME.fullmatch(name):
        raise _unusable(f"{name[:80]!r} is no name of a key: letters, digits and . _ @ -, up to 64")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """All keys. Those of a file are read again when it has changed; one that cannot be used changes nothing."""

    def __init__(self, settings: ApiSettings, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Read the keys.

        Raises:
            SettingsError: the file or an entry cannot be used.
        """
        self._default = Allowance(
            requests=settings.key_requests, tokens=settings.key_tokens, concurrent=settings.key_concurrent
        )
        self._monotonic = monotonic
        self._looked_at = monotonic()
        self._path: Path | None = None
        self._version: tuple[int, ...] = ()
        if not settings.api_keys:
            self._keys: tuple[ApiKey, ...] = ()
        elif HASH_PREFIX in settings.api_keys:
            self._keys = _checked([_inline(word) for word in settings.api_keys.split()], self._default)
        else:
            self._path = Path(settings.api_keys)
            self._version = _version(self._path)
            self._keys = _read(self._path, self._default)
        self.is_open = not settings.api_keys
        """Whether whoever reaches the port is let in. A file that has no key lets nobody in."""

    def holder(self, key: str) -> ApiKey | None:
        """Whose key this is. Takes the same time for every key that is none."""
        self._look_again()
        digest = _digest(key)
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found

    def _look_again(self) -> None:
        now = self._monotonic()
        if self._path is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = _read(self._path, self._default)
        except SettingsError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            logger.info("%d keys read from %s", len(self._keys), self._path)


def _version(path: Path) -> tuple[int, ...]:
    """What is different when the file is; empty for none."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read(path: Path, default: Allowance) -> tuple[ApiKey, ...]:
    try:
        parsed = msgspec.convert(tomllib.loads(path.read_text()), _File)
    except OSError as error:
        raise _unusable(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise _unusable(f"{path}: {error}") from error
    return _checked(parsed.key, default)


def _inline(word: str) -> _Entry:
    name, _, hash_ = word.partition("=")
    return _Entry(name=name, hash=hash_)


def _checked(entries: list[_Entry], default: Allowance) -> tuple[ApiKey, ...]:
    names: set[str] = set()
    for entry in entries:
        check_name(entry.name)
        if not _HASH.fullmatch(entry.hash):
            # Not shown: it may be the key itself.
            raise _unusable(f"the hash of {entry.name!r} is not sha256: and 64 hexadecimal digits")
        if entry.name in names:
            raise _unusable(f"the name {entry.name!r} is there twice")
        names.add(entry.name)
    return tuple(
        ApiKey(
            name=entry.name,
            digest=bytes.fromhex(entry.hash.removeprefix(HASH_PREFIX)),
            allowance=_allowance(entry, default),
        )
        for entry in entries
    )


def _allowance(entry: _Entry, default: Allowance) -> Allowance:
    own: dict[str, Any] = {name: getattr(entry, name) for name in Allowance.__struct_fields__}
    for name, value in own.items():
        if value is not None and not 0 <= value <= 1_000_000_000:
            raise _unusable(f"{name} of {entry.name!r} is {value}, and must be 0 to 1000000000")
    return msgspec.structs.replace(default, **{name: value for name, value in own.items() if value is not None})


def _unusable(reason: str) -> SettingsError:
    return SettingsError(f"{source('api_keys')}: {reason}")
