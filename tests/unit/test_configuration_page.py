"""Settings, their readers and their documentation stay together."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from deploy.reference import document
from shared.settings import ApiSettings, WorkerSettings

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_settings_say() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == document(), "run `make docs`"


@pytest.mark.parametrize(("cls", "folder"), [(ApiSettings, "api"), (WorkerSettings, "workers")])
def test_each_setting_has_a_reader(cls: type, folder: str) -> None:
    read = attributes_of_settings(ROOT / folder) | attributes_of_settings(ROOT / "deploy")
    assert {item.name for item in fields(cls)} <= read


def attributes_of_settings(folder: Path) -> set[str]:
    """The names that the code of a folder reads from something called `settings` or `limits`."""
    return {
        node.attr
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and any(word in ast.unparse(node.value).rpartition(".")[2] for word in ("settings", "limits"))
    }
