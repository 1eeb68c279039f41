"""What the documents name exists."""

import re
from pathlib import Path

import pytest
from servers import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PATHS = re.compile(r"`((?:api|workers|shared|deploy|tests|bench|docs)/[\w./*-]*)`")
LINKS = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
NAMED = re.compile(r"`([A-Z][A-Za-z]+)(?:\.(\w+))?` \(`([\w/]+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_link_of_a_page_is_there(page: Path) -> None:
    text = page.read_text()
    written = {"bench/results/"}
    missing = [path for path in PATHS.findall(text) if path not in written and not (ROOT / path).exists()]
    missing += [link for link in LINKS.findall(text) if not (page.parent / link).exists()]
    assert missing == []


def test_the_trace_names_what_its_files_define() -> None:
    named = NAMED.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 8
    for name, attribute, path in named:
        source = (ROOT / path).read_text()
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), (name, path)
        assert not attribute or re.search(rf"^    def {attribute}\b", source, re.MULTILINE), (name, attribute, path)


def test_every_page_and_decision_is_reached_from_the_readme() -> None:
    linked = {
        path.resolve() for page in PAGES for path in (page.parent / link for link in LINKS.findall(page.read_text()))
    }
    unreached = [
        str(page.relative_to(ROOT)) for page in PAGES if page.parts[-2] in ("docs", "adr") and page not in linked
    ]
    assert [name for name in unreached if name != "docs/adr/README.md"] == []
