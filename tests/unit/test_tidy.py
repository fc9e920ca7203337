"""Style that linters cannot check, over every Python file of the product.

Each check takes a source and yields what is wrong with it, as `path:line: what, and what to do`.
An exception is listed with its reason, and one that nothing needs any more is a failure, too.
Each check is shown a planted offence, so that it cannot pass by being blind.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
IMPORT_ROOTS = ("", "connectors", "kernels", "benchmarks")
PRODUCT = ("tiering", "connectors", "kernels", "benchmarks", "docs")

FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 100

# The shell, what tests it, and what shows it; all else decides in plain functions.
MAY_AWAIT = (
    "tiering/tiers/",
    "tiering/pipeline/",
    "tiering/portal.py",
    "tiering/process/child.py",
    "tiering/store.py",
    "tiering/underway.py",
    "tiering/broadcast.py",
    "tiering/events/publisher.py",
    "tiering/events/subscriber.py",
    "tiering/peers/calls.py",
    "tiering/peers/control.py",
    "tiering/peers/transports/",
    "tiering/proxy/server.py",
    "tiering/proxy/upstream.py",
    "tiering/cli/events.py",
    "tiering/cli/proxy.py",
    "tiering/testing/",
    "benchmarks/",
    "docs/examples/",
)

NEVER_IMPORTED = {
    "tiering.__main__": "`python -m tiering`",
    "tiering.events.publisher": "for programs, see docs/api.md",
    "tiering.process.child": "run by tiering.process.keeper, in a process of its own",
    "tiering_benchmarks.mend_vllm_cpu": "run by the Makefile while it sets up the environment",
}


@dataclass(frozen=True)
class Source:
    """A file: its path from the repository's root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def names_used(self) -> list[tuple[int, str]]:
        """Lines and full names of what it imports, and of what it uses of that or of builtins."""
        return list(_names_used(self))

    @property
    def module(self) -> str:
        path = self.path.removesuffix(".py").removesuffix("/__init__")
        for root in IMPORT_ROOTS[1:]:
            path = path.removeprefix(f"{root}/")
        return path.replace("/", ".")


@dataclass(frozen=True)
class Ban:
    """A name that is not to be used, what to use instead, and which files may, and why."""

    name: str
    instead: str
    allowed: dict[str, str] = field(default_factory=dict)


_MEASURES = {"benchmarks/": "it measures"}
_TALKS = {
    "tiering/cli/": "what a command prints is its result",
    "benchmarks/": "what a command prints is its result",
    "docs/examples/": "shows what it found",
}
BANS = (
    Ban(
        "time.monotonic", "a Clock, handed in", {"tiering/clock.py": "it is the clock"} | _MEASURES
    ),
    Ban("time.time", "a Clock, handed in", {"tiering/clock.py": "it is the clock"}),
    Ban("time.perf_counter", "a Clock, handed in", _MEASURES),
    Ban("datetime.datetime.now", "a Clock, handed in"),
    Ban(
        "os.environ",
        "a setting",
        {
            "benchmarks/": "a server inherits the environment",
            "tiering/peers/transports/nixl.py": "UCX is told by it what it must not load",
            "tiering/testing/children.py": "a process inherits some of it",
            "tiering/tiers/peers/making.py": "vLLM's variables stand for keys that are left out",
        },
    ),
    Ban("os.getenv", "a setting"),
    Ban("print", "logging or a return value", _TALKS),
    Ban(
        "asyncio.create_task",
        "a TaskGroup's create_task",
        {"tiering/testing/": "the contract cancels tasks of its own"},
    ),
    Ban("asyncio.ensure_future", "a TaskGroup's create_task"),
    Ban("pickle", "msgspec"),
    Ban("marshal", "msgspec"),
    Ban("shelve", "msgspec"),
)

# /home/me is nobody's: an example in messages.
MACHINE_PATH = re.compile(r"/(?:home|root|Users|work)/(?!me\b)\w")
INDEX_ADDRESS = re.compile(r"https?://[^\s\"']*(?:pypi|/simple\b|/whl\b)|--(?:extra-)?index-url")
LEFT_OVER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")

Problems = Iterator[str]


def says_what_it_owns(source: Source) -> Problems:
    if not ast.get_docstring(source.tree):
        yield f"{source.path}:1: no docstring; say what the file owns and who may call it"


def is_short(source: Source) -> Problems:
    if len(source.lines) > FILE_LINES_MAX:
        yield f"{source.path}:1: {len(source.lines)} lines, more than {FILE_LINES_MAX}; split it"


def has_short_lines(source: Source) -> Problems:
    for number, line in enumerate(source.lines, 1):
        if len(line) > LINE_COLUMNS_MAX:
            yield f"{source.path}:{number}: {len(line)} columns, more than {LINE_COLUMNS_MAX}"


def has_short_functions(source: Source) -> Problems:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                told = f"{node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"
                yield f"{source.path}:{node.lineno}: {told}; split it"


def awaits_in_the_shell_only(source: Source) -> Problems:
    if source.path.startswith(MAY_AWAIT):
        return
    for node in source.nodes:
        if isinstance(node, ast.AsyncFunctionDef):
            told = f"async def {node.name}; decide here, and let the pipeline await"
            yield f"{source.path}:{node.lineno}: {told}"


def uses_nothing_banned(source: Source) -> Problems:
    for line, name in sorted(source.names_used):
        for ban in BANS:
            if is_or_is_in(name, ban.name) and not source.path.startswith(tuple(ban.allowed)):
                yield f"{source.path}:{line}: {ban.name}; use {ban.instead}"


def names_no_machine(source: Source) -> Problems:
    for number, line in enumerate(source.lines, 1):
        if MACHINE_PATH.search(line):
            yield f"{source.path}:{number}: a path of one machine; take it from the settings"
        if INDEX_ADDRESS.search(line):
            yield f"{source.path}:{number}: a package index; pip's configuration names it"


def leaves_nothing_over(source: Source) -> Problems:
    for number, line in enumerate(source.lines, 1):
        if found := LEFT_OVER.search(line):
            yield f"{source.path}:{number}: {found[0]}; do it, or say in an issue what is missing"


CHECKS: tuple[Callable[[Source], Problems], ...] = (
    says_what_it_owns,
    is_short,
    has_short_lines,
    has_short_functions,
    awaits_in_the_shell_only,
    uses_nothing_banned,
    names_no_machine,
    leaves_nothing_over,
)


def _names_used(source: Source) -> Iterator[tuple[int, str]]:
    meaning: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                meaning[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in source.nodes:
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load) and node is not inner:
            yield inner.lineno, ".".join([meaning.get(inner.id, inner.id), *reversed(parts)])
        elif isinstance(node, ast.Name) and node.id not in meaning:
            yield node.lineno, node.id


def is_or_is_in(name: str, of: str) -> bool:
    return name == of or name.startswith(f"{of}.")


def dead_files(sources: Sequence[Source], entries: set[str]) -> Iterator[str]:
    """Modules that no other one imports or names in a string, and that are no entry point."""
    modules = {source.module: source for source in sources}
    wanted = set(entries)
    for source in sources:
        named = {name for _, name in source.names_used} | {
            node.value
            for node in source.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for name in named:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and modules[name] is not source:
                wanted.add(name)
    for module, source in modules.items():
        if module not in wanted and not source.path.endswith("__init__.py"):
            yield f"{source.path}:1: nobody imports it; remove it, or say who runs it"


@cache
def sources_under(*roots: str) -> tuple[Source, ...]:
    return tuple(
        Source(path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8"))
        for root in roots
        for path in sorted((REPOSITORY / root).rglob("*.py"))
    )


def product() -> tuple[Source, ...]:
    return sources_under(*PRODUCT)


def used_by_tests() -> set[str]:
    """The modules of `tiering.testing` that tests import: they are there for tests."""
    using = [source for source in sources_under("tests") if "tiering.testing" in source.text]
    names = {name for source in using for _, name in source.names_used}
    modules = {source.module for source in product() if source.path.startswith("tiering/testing/")}
    return {module for module in modules if any(is_or_is_in(name, module) for name in names)}


def entry_points() -> set[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return {target.split(":")[0] for group in groups for target in group.values()}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_file(check: Callable[[Source], Problems]) -> None:
    sources = product()
    assert len(sources) > 50, "the files are not where this test looks for them"
    assert [problem for source in sources for problem in check(source)] == []


def test_every_file_is_imported_by_another() -> None:
    code = [source for source in product() if not source.path.startswith("docs/")]
    dead = list(dead_files(code, entry_points() | used_by_tests()))
    modules = {source.path: source.module for source in code}
    found = {modules[problem.split(":")[0]] for problem in dead}
    assert found - set(NEVER_IMPORTED) == set(), dead
    assert set(NEVER_IMPORTED) - found == set(), "an exception that nothing needs any more"


def test_every_exception_is_still_needed() -> None:
    uses = [(source.path, name) for source in product() for _, name in source.names_used]
    stale = [
        f"{ban.name} in {place}"
        for ban in BANS
        for place in ban.allowed
        if not any(path.startswith(place) and is_or_is_in(name, ban.name) for path, name in uses)
    ]
    assert stale == []
    shell = {
        place
        for source in product()
        for place in MAY_AWAIT
        if source.path.startswith(place)
        and any(isinstance(node, ast.AsyncFunctionDef) for node in source.nodes)
    }
    # A benchmark of the API awaits; today's measure the core and servers.
    assert shell | {"benchmarks/"} == set(MAY_AWAIT)


LONG_FUNCTION = "def long():\n" + "    pass\n" * FUNCTION_LINES_MAX
OFFENCES: list[tuple[Callable[[Source], Problems], str, str, list[str]]] = [
    (
        says_what_it_owns,
        "tiering/a.py",
        "# a comment\n",
        ["tiering/a.py:1: no docstring; say what the file owns and who may call it"],
    ),
    (
        is_short,
        "tiering/a.py",
        "pass\n" * (FILE_LINES_MAX + 1),
        ["tiering/a.py:1: 451 lines, more than 450; split it"],
    ),
    (
        has_short_lines,
        "tiering/a.py",
        f"{'a' * 100}\n{'b' * 101}\n",
        ["tiering/a.py:2: 101 columns, more than 100"],
    ),
    (
        has_short_functions,
        "tiering/a.py",
        LONG_FUNCTION,
        ["tiering/a.py:1: long has 71 lines, more than 70; split it"],
    ),
    (
        awaits_in_the_shell_only,
        "tiering/residency/a.py",
        "class A:\n    async def b(self): ...\n",
        ["tiering/residency/a.py:2: async def b; decide here, and let the pipeline await"],
    ),
    (awaits_in_the_shell_only, "tiering/tiers/a.py", "async def b(): ...\n", []),
    (
        uses_nothing_banned,
        "tiering/a.py",
        "import time\ntime.time()\nclock = time.monotonic\n",
        [
            "tiering/a.py:2: time.time; use a Clock, handed in",
            "tiering/a.py:3: time.monotonic; use a Clock, handed in",
        ],
    ),
    (
        uses_nothing_banned,
        "tiering/a.py",
        "import os as o\nfrom time import perf_counter as p\nhome = o.environ['HOME']\n",
        [
            "tiering/a.py:2: time.perf_counter; use a Clock, handed in",
            "tiering/a.py:3: os.environ; use a setting",
        ],
    ),
    (
        uses_nothing_banned,
        "tiering/store.py",
        "import asyncio, pickle\nasyncio.create_task(f())\ngroup.create_task(f())\nprint(1)\n",
        [
            "tiering/store.py:1: pickle; use msgspec",
            "tiering/store.py:2: asyncio.create_task; use a TaskGroup's create_task",
            "tiering/store.py:4: print; use logging or a return value",
        ],
    ),
    (
        uses_nothing_banned,
        "tiering/a.py",
        "from datetime import datetime\nprinted = datetime.now()\n",
        ["tiering/a.py:2: datetime.datetime.now; use a Clock, handed in"],
    ),
    (uses_nothing_banned, "tiering/cli/a.py", "print(1)\n", []),
    (
        names_no_machine,
        "tiering/a.py",
        "a = '/home/bob/models'\nb = 'https://index.example" + "/simple'\nc = '/mnt/kv'\n",
        [
            "tiering/a.py:1: a path of one machine; take it from the settings",
            "tiering/a.py:2: a package index; pip's configuration names it",
        ],
    ),
    (
        leaves_nothing_over,
        "tiering/a.py",
        "pass  # TODO: later\n",
        ["tiering/a.py:1: TODO; do it, or say in an issue what is missing"],
    ),
]


@pytest.mark.parametrize(("check", "path", "text", "expected"), OFFENCES)
def test_a_check_finds_a_planted_offence(
    check: Callable[[Source], Problems], path: str, text: str, expected: list[str]
) -> None:
    assert list(check(Source(path, text))) == expected


def test_every_check_is_shown_an_offence() -> None:
    assert {check for check, _, _, expected in OFFENCES if expected} == set(CHECKS)


def test_a_file_that_nobody_imports_is_found() -> None:
    sources = [
        Source("tiering/a.py", "from tiering import b\nHOME = 'tiering.c'\n"),
        Source("tiering/b.py", ""),
        Source("tiering/c.py", ""),
        Source("benchmarks/tiering_benchmarks/d.py", "import tiering_benchmarks.d\n"),
        Source("tiering/__init__.py", ""),
    ]
    assert list(dead_files(sources, {"tiering.a"})) == [
        "benchmarks/tiering_benchmarks/d.py:1: nobody imports it; remove it, or say who runs it"
    ]
