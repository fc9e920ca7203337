"""`tiering proxy` as a command: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from stand_in_engines import DEADLINE_SECONDS, Client, standing_in
from tiering.cli import _parser, main
from tiering.peers.addresses import Address
from tiering.proxy import roles
from tiering.proxy.engines import Engine, Lineup
from tiering.proxy.prefixes import REMEMBERED_STEPS_MAX, STEP_CHARS
from tiering.proxy.server import BODY_BYTES_MAX, REQUESTS_MAX
from tiering.proxy.standing import BACK_OFF_SECONDS_MAX

GUIDE = (Path(__file__).parents[2] / "docs" / "p2p.md").read_text()
Output = pytest.CaptureFixture[str]


async def started(*options: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "tiering", "proxy", "--port", "0", *options]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
async def test_it_serves_until_it_is_ended(number: signal.Signals, code: int) -> None:
    async with standing_in("p", "d") as (p, d):
        process = await started("--prefill", p.text, "--decode", d.text, "--verbose")
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), DEADLINE_SECONDS)).decode()
            url, told = line.split(maxsplit=1)
            assert told == "before 1 prefiller and 1 decoder\n"
            assert url.startswith("http://127.0.0.1:")
            async with aiohttp.ClientSession() as session:
                assert (await Client(url, session).post({"prompt": "a"}))[0] == 200
            process.send_signal(number)
            _, err = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == code
        lines = err.decode().splitlines()
        assert lines[0].startswith(f"proxy: /v1/completions prefilled by {p.engine}, {{'remote_de")
        assert lines[1].startswith(f"proxy: /v1/completions answered by {d.engine}, {{'remote_pre")
        assert len(lines) == 2


async def test_json_is_one_line(capsys: Output) -> None:
    async with standing_in("a", "b") as (a, b):
        process = await started("--engine", a.text, b.text, "--json")
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_SECONDS)
        finally:
            process.kill()
            await process.wait()
    told = json.loads(line)
    assert told["url"].startswith("http://127.0.0.1:")
    assert (told["prefillers"], told["servers"]) == ([], [str(a.engine), str(b.engine)])


ENGINE = "http://127.0.0.1:1=127.0.0.1:5710"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "tiering: --engine = None: is missing; give --prefill and --decode, or --engine"),
        (["--engine", "h"], "tiering: --engine = 'h': is not URL=HOST:PORT; write for example"),
        (["--engine", ENGINE, "--port", "65536"], "argument --port: 65536 is no port"),
        (["--engine", ENGINE, "--port", "http"], "argument --port: http is no port"),
        (["--engine", ENGINE, "--prefill-seconds", "0"], "0 is not a number above 0"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused(
    options: Sequence[str], told: str, capsys: Output
) -> None:
    try:
        code: object = main(["proxy", *options])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert told in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_sentence(capsys: Output) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["proxy", "--engine", ENGINE, "--port", str(port)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"tiering: 127.0.0.1:{port} cannot be bound: ")
    assert told.endswith("; choose with --host and --port\n")
    assert len(told.splitlines()) == 1


def test_without_aiohttp_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from tiering.cli import main\n"
        f"sys.exit(main(['proxy', '--engine', {ENGINE!r}]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        "tiering: the proxy speaks HTTP, and the package aiohttp is not installed: "
        "run pip install 'kv-tiering[proxy]'\n"
    )


# The guide


def test_the_commands_of_the_guide_are_taken() -> None:
    bash = "".join(re.findall(r"^```bash\n(.*?)^```", GUIDE, re.M | re.S)).replace("\\\n", "")
    commands = [shlex.split(line)[1:] for line in bash.splitlines() if "tiering proxy" in line]
    lineups = []
    for command in commands:
        given = _parser().parse_args(command)
        lineups.append(Lineup.parse(given.prefill, given.decode, given.engine))
    assert [(len(each.prefillers), len(each.servers)) for each in lineups] == [(1, 1), (0, 2)]
    engine = next(text for text in re.findall(r"`--prefill (\S+)`", GUIDE))
    assert Engine.parse("--prefill", engine).peer == Address("10.0.0.7", 5710)
    options = set(re.findall(r"`(--(?:prefill|engine|verbose|host)[a-z-]*)", GUIDE))
    given = vars(_parser().parse_args(["proxy"]))
    assert {option[2:].replace("-", "_") for option in options} <= set(given)


def test_the_examples_of_roles_are_what_the_proxy_sends() -> None:
    examples = dict(re.findall(r"^```json (prefill|decode|source)\n(.*?)^```", GUIDE, re.M | re.S))
    asked = roles.read(b"{}")
    assert isinstance(asked, roles.Asked)
    prefiller, source = (Engine("http://h", Address(f"10.0.0.{at}", 5710)) for at in (7, 8))
    for name, sent in (
        ("prefill", asked.for_prefill(roles.remote_decoder("4f1c"))),
        ("decode", asked.with_role(roles.remote_prefiller("4f1c", prefiller))),
        ("source", asked.with_role(roles.remote_kv_source("9a02", source))),
    ):
        assert json.loads(examples[name]) == json.loads(sent)


def test_the_numbers_of_the_guide_are_those_of_the_proxy() -> None:
    for told in (
        f"hashes of\n  {STEP_CHARS} characters and all before them",
        f" before them, {REMEMBERED_STEPS_MAX:,} at most",
        f"up to {BACK_OFF_SECONDS_MAX:g};",
        f"bodies above {BODY_BYTES_MAX >> 20} MiB (413), more than {REQUESTS_MAX:,} requests",
    ):
        assert told in GUIDE
