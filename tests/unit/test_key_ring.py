"""The ring of API keys, over a file and a clock."""

import logging
from pathlib import Path

import pytest

from api.access.keys import LOOK_EVERY_S, Allowance, KeyRing, new_key
from deploy.cli import main
from shared.errors import SettingsError
from shared.settings import ApiSettings

KEY, HASH = new_key()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_has_256_random_bits_and_is_not_in_its_hash() -> None:
    keys = {new_key()[0] for _ in range(100)}

    assert len(keys) == 100
    assert all(key.startswith("tm-") and len(key) == 3 + 43 for key in keys)
    assert KEY not in HASH


def test_an_entry_s_limits_go_before_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "alice"\nhash = "{HASH}"\ntokens = 5\nconcurrent = 0\n')

    holder = KeyRing(ApiSettings(api_keys=str(path), key_requests=7, key_concurrent=3)).holder(KEY)

    assert holder is not None
    assert (holder.name, holder.allowance) == ("alice", Allowance(requests=7, tokens=5, concurrent=0))


def test_a_file_that_has_become_unusable_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "alice"\nhash = "{HASH}"\n')
    clock = Clock()
    ring = KeyRing(ApiSettings(api_keys=str(path)), monotonic=clock)

    for spoil in (lambda: path.write_text("[[key]\n"), path.unlink):
        caplog.clear()
        spoil()
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                clock.now += LOOK_EVERY_S
                assert ring.holder(KEY)
        assert len(caplog.records) == 1
        assert "the keys stay as they were" in caplog.text

    path.write_text("")
    clock.now += LOOK_EVERY_S
    assert ring.holder(KEY) is None
    assert not ring.is_open


def test_the_command_makes_what_goes_into_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice"]) == 0
    key, _, entry = capsys.readouterr().out.partition("\n\n")
    path = tmp_path / "keys.toml"
    path.write_text(entry)

    holder = KeyRing(ApiSettings(api_keys=str(path))).holder(key)

    assert holder is not None
    assert holder.name == "alice"
    assert main(["key", "a b"]) == 2
    assert "'a b' is no name of a key" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["alice=sha256:12", f"={HASH}", f"a={HASH} a={HASH}", f"a b={HASH}"])
def test_entries_that_cannot_be_used_are_refused(value: str) -> None:
    with pytest.raises(SettingsError, match=r"--api-keys \(TOKENMILL_API_KEYS\)"):
        KeyRing(ApiSettings(api_keys=value))
