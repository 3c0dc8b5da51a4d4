"""Every number in a table of results is recomputed from the curves, and says how it was made."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "tools"))
import make_tables  # noqa: E402

PAGES = [path for path in make_tables.PAGES if path.exists()]
EVIDENCE = re.compile(
    r"<!-- table \w+ -->|!\[[^]]*\]\((docs/)?results/|<img src=\"(docs/)?results/"
)


def sections(page: str) -> list[str]:
    """The text under every heading outside code blocks."""
    pieces, fenced = [""], False
    for line in page.splitlines():
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            pieces.append("")
        pieces[-1] += line + "\n"
    return pieces


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_what_the_curves_say(path):
    page = path.read_text()
    assert "<!-- table" in page
    assert make_tables.fill(page) == page, "run python docs/tools/make_tables.py"


def test_a_number_changed_by_hand_is_found():
    page = (
        "<!-- table door_aquadqn -->\n"
        + make_tables.door_aquadqn().replace("0.82", "0.92")
        + "\n<!-- end -->"
    )
    assert make_tables.fill(page) != page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_figure_and_table_names_its_command(path):
    silent = [
        text
        for text in sections(path.read_text())
        if EVIDENCE.search(text) and "python " not in text
    ]
    assert silent == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_picture_exists(path):
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"", path.read_text())
    names = [name for pair in pictures for name in pair if name]
    assert [name for name in names if not (path.parent / name).exists()] == []
