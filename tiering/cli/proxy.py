"""`tiering proxy`: takes requests for several engines until it is ended."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

import orjson

from tiering.cli import exits, words
from tiering.proxy.engines import Lineup
from tiering.proxy.server import Patience, serving


def run(arguments: argparse.Namespace) -> int:
    lineup = Lineup.parse(arguments.prefill, arguments.decode, arguments.engine)
    logging.basicConfig(
        format="proxy: %(message)s", level=logging.INFO if arguments.verbose else logging.WARNING
    )
    return asyncio.run(_serve(arguments, lineup))


async def _serve(arguments: argparse.Namespace, lineup: Lineup) -> int:
    patience = Patience(prefill_seconds=arguments.prefill_seconds)
    async with serving(lineup, arguments.host, arguments.port, patience) as url:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        _tell(url, lineup, arguments.json)
        await ended.wait()
    return exits.OK


def _tell(url: str, lineup: Lineup, as_json: bool) -> None:
    """Once: where it serves, for whom."""
    if as_json:
        told = {
            "url": url,
            "prefillers": list(map(str, lineup.prefillers)),
            "servers": list(map(str, lineup.servers)),
        }
        print(orjson.dumps(told).decode(), flush=True)
        return
    if lineup.prefillers:
        prefillers = words.count(len(lineup.prefillers), "prefiller")
        before = f"{prefillers} and {words.count(len(lineup.servers), 'decoder')}"
    else:
        before = words.count(len(lineup.servers), "engine")
    print(f"{url} before {before}", flush=True)
