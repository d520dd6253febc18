"""The generated pages are those of the committed code, and say what a reader looks for."""

import re
from pathlib import Path

import pytest

from blitzd.events.record import REGISTRY
from blitzd.fsm.table import ROWS, ReplicaState
from scripts.generate_docs import OURS_BELOW, PAGES, events_page, states_page

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_not_stale(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_the_diagram_has_every_row_with_its_number() -> None:
    page = states_page()
    drawn = set(re.findall(r"^    (\w+) --> (\w+): (.+)$", page, re.MULTILINE))
    for row in ROWS:
        label = f"{row.number} {row.trigger}" if row.number else row.trigger
        assert ((row.source, row.dest, label) in drawn) == (row.trigger != "lose"), row
    assert "Two rules hold this file together" in page, "the theory of operation"
    assert all(f"| {state} |" in page for state in ReplicaState)


def test_every_record_type_says_what_it_means() -> None:
    page = events_page()
    for cls in REGISTRY.values():
        if cls.type_id < OURS_BELOW:
            section = page.split(f"### {cls.__name__}\n", 1)[1].split("\n###", 1)[0]
            assert f"id {cls.type_id}, {cls.durability.name.lower()}" in section
            assert cls.__doc__, f"{cls.__name__} has no docstring"
            assert " ".join(cls.__doc__.split())[:40] in section
