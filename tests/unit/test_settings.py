"""Settings that are more than a number or a word."""

import pytest

from shared.errors import SettingsError
from shared.settings import ApiSettings, origins


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("", set()),
        ("*", {"*"}),
        ("https://a.example", {"https://a.example"}),
        (
            "https://a.example,http://localhost:3000  http://[::1]:8080",
            {"https://a.example", "http://localhost:3000", "http://[::1]:8080"},
        ),
        ("chrome-extension://abcdef", {"chrome-extension://abcdef"}),
        ("http://a.example:443", {"http://a.example:443"}),
    ],
)
def test_origins_come_after_commas_or_spaces(value: str, found: set[str]) -> None:
    assert origins(ApiSettings(cors_origins=value).cors_origins) == found


@pytest.mark.parametrize(
    "value",
    [
        *("https://a.example/", "https://a.example/path", "https://A.example", "a.example", "//a.example", "null"),
        *("https://a.example:443", "http://a.example:80", "http://a.example:0", "http://a.example:70000"),
        *("http://a.example:x", "http://user@a.example", "http://-a", "http://", "* https://a.example", "https://*.a"),
        *("https://a.example\u00e9", "https://a.example;", "**"),
    ],
)
def test_an_origin_that_no_browser_would_send_is_refused_by_name(value: str) -> None:
    with pytest.raises(SettingsError, match=r"^--cors-origins \(TOKENMILL_CORS_ORIGINS\): "):
        ApiSettings(cors_origins=value)
