"""The page at /docs: everything on it comes from the server itself, and a browser shows it."""

import re
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from browser import rendered
from servers import FrontEnd

ASSET = re.compile(r'(?:src|href)="([^"]+)"')
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|javascript:")


def test_all_that_the_page_names_is_served_from_here_as_what_it_is(front_end: FrontEnd) -> None:
    page = httpx.get(f"{front_end.url}/docs")

    named = ASSET.findall(page.text)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert len(named) > 4
    kinds = {"js": "text/javascript", "css": "text/css", "png": "image/png", "json": "application/json"}
    for name in named:
        url = urljoin(str(page.url), name)
        asset = httpx.get(url)
        assert url.startswith(front_end.url)
        assert asset.status_code == 200, name
        assert asset.headers["Content-Type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
        assert asset.headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_may_run_that_stands_in_the_page_or_comes_from_elsewhere(front_end: FrontEnd) -> None:
    page = httpx.get(f"{front_end.url}/docs")

    policy = dict(
        directive.strip().partition(" ")[::2] for directive in page.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert (policy["script-src"], policy["style-src"], policy["connect-src"]) == ("'self'",) * 3
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    assert not INLINE.search(page.text)


@pytest.mark.parametrize("name", ["index.html", "..%2Fdocs.py", "docs.html", "swagger-ui.js", "x"])
def test_no_other_file_is_served(front_end: FrontEnd, name: str) -> None:
    assert httpx.get(f"{front_end.url}/docs/{name}").status_code == 404


def test_a_browser_without_a_network_shows_every_operation_and_refuses_nothing(
    front_end: FrontEnd, tmp_path: Path
) -> None:
    description = httpx.get(f"{front_end.url}/openapi.json").json()

    page, complaints = rendered(f"{front_end.url}/docs", tmp_path)

    for path, methods in description["paths"].items():
        for operation in methods.values():
            assert operation["summary"] in page, path
    assert complaints == []
