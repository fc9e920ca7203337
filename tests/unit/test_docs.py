"""What the documents say is so: links lead somewhere, code runs, names exist."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tiering
from tiering import KVLayout, StoreConfig
from tiering.events.announcer import COUNTERS as EVENT_COUNTERS
from tiering.events.publisher import ZmqPublisher
from tiering.residency.core import COUNTERS
from tiering.residency.state import TRANSITIONS, SlotEvent, SlotState
from tiering_connectors.vllm.meter import PORTAL_COUNTERS

TOP = Path(__file__).parents[2]
DOCUMENTS = sorted([*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")])
EXAMPLES = sorted(TOP.glob("docs/examples/*.py"))


def fences(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(TOP)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    """Twice: the second time there is something to find."""
    outputs = [
        subprocess.run(
            [sys.executable, str(example), str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert outputs[0].startswith("0 of 62")
    assert outputs[1].startswith("62 of 62")


def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    (source,) = fences(TOP / "README.md", "python")
    small = source.replace("layers=32", "layers=1").replace("8 * GiB", "64 << 20")
    small = small.replace("/mnt/kv", str(tmp_path))
    assert small != source
    names: dict[str, object] = {}
    exec(compile(small, "README.md", "exec"), names)
    layout = names["layout"]
    assert isinstance(layout, KVLayout)
    tokens = list(range(40))
    pages = [bytearray(bytes([i + 1]) * layout.chunk_bytes) for i in range(2)]
    asyncio.run(names["serve"](tokens, pages))  # type: ignore[operator]
    blank = [bytearray(layout.chunk_bytes) for _ in range(2)]
    asyncio.run(names["serve"](tokens, blank))  # type: ignore[operator]
    assert blank == pages


def test_a_stores_events_are_published_as_the_api_page_says(tmp_path: Path) -> None:
    *_, source = fences(TOP / "docs/api.md", "python")
    local = re.sub(r"tcp://\*:\d+", "tcp://127.0.0.1:0", source)
    program = "async def run():\n" + textwrap.indent(local, "    ")
    program += "    return events.stats(), publisher.stats()\n"
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, block_tokens=16)
    names: dict[str, object] = {
        "Broadcast": tiering.Broadcast,
        "TieredStore": tiering.TieredStore,
        "ZmqPublisher": ZmqPublisher,
        "config": StoreConfig(layout=layout, cpu_bytes_to_use=64 << 20),
        "tokens": list(range(64)),
        "pages": [bytes(layout.chunk_bytes)] * (64 // layout.chunk_tokens),
    }
    exec(compile(program, "api.md", "exec"), names)
    told, sent = asyncio.run(names["run"]())  # type: ignore[operator]
    assert told["events_blocks_stored"] == sent.blocks == 64 // layout.block_tokens


def test_the_program_about_events_in_the_api_page_runs() -> None:
    _, source, _ = fences(TOP / "docs/api.md", "python")
    local = re.sub(r"tcp://\*:\d+", "tcp://127.0.0.1:0", source)
    assert local != source
    names: dict[str, object] = {}
    exec(compile(local, "api.md", "exec"), names)
    assert asyncio.run(names["tell_and_follow"]()) == 1  # type: ignore[operator]


def test_the_api_page_names_what_there_is() -> None:
    source, *_ = fences(TOP / "docs/api.md", "python")
    used = set(re.findall(r"\b(StoreConfig|KVLayout|FsTierConfig|GiB|TieredStore)\b", source))
    assert used - {"TieredStore"} <= set(tiering.__all__)
    table = re.findall(r"^\| `(\w+)\(", (TOP / "docs/api.md").read_text(), re.M)
    assert table == ["match", "load", "save", "drop", "flush", "stats"]
    assert all(callable(getattr(tiering.TieredStore, name)) for name in table)
    assert "layout" in StoreConfig.model_fields


def test_every_counter_of_the_core_is_explained_and_no_other() -> None:
    section = (TOP / "docs/metrics.md").read_text().split("## Ours")[1].split("\n\n")[2]
    told = [
        name
        for cell in re.findall(r"^\| (`.*?`) \|", section, re.M)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    counted = (*COUNTERS, *EVENT_COUNTERS, *PORTAL_COUNTERS)
    assert set(counted) <= set(told)
    assert len(told) == len(set(told))
    assert all(name in counted or name.startswith(("load", "store")) for name in told)


def test_the_diagram_of_states_has_every_state_and_event() -> None:
    text = (TOP / "docs/architecture.md").read_text()
    diagram = text.split("The states of a slot:")[1].split("```")[1]
    assert {state for state in SlotState if state.name in diagram} == set(SlotState)
    events = {event for _, event in TRANSITIONS}
    assert {event for event in SlotEvent if event.name.lower() in diagram} == events


def test_commands_that_are_named_exist() -> None:
    makefile = (TOP / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"`make ([a-z-]+)", document.read_text()):
            assert re.search(rf"^{target}:", makefile, re.M), f"{document.name}: make {target}"


def test_tests_that_are_named_exist() -> None:
    """Of what is said to be supported, they are the proof."""
    files = list((TOP / "tests").rglob("test_*.py"))
    there = {path.stem for path in files}
    for path in files:
        there |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M))
    named = {n for d in DOCUMENTS for n in re.findall(r"\b(test_\w+)\b(?!\*)", d.read_text())}
    assert "test_a_restart_over_the_same_disk" in named
    assert named - there == set()
