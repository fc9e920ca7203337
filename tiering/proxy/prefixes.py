"""Which engine was sent a prompt with which beginning: a guess at what it has cached. Pure.

A prompt's text is cut into steps of STEP_CHARS, and each has a hash over itself and all before it,
so that prompts with a common beginning have the first hashes in common. Engines hash tokens and
not text; a guess that is wrong costs a question to a peer, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson
import xxhash

from tiering.proxy.engines import Engine

STEP_CHARS = 512
STEPS_MAX = 1024
"""Of one prompt; what is behind them is not looked at."""
REMEMBERED_STEPS_MAX = 65536
"""Of one engine, those used longest ago being forgotten first."""

_CHARS_MAX = STEP_CHARS * STEPS_MAX
# What makes the same text another prompt.
_SETTINGS = ("model", "cache_salt", "chat_template", "chat_template_kwargs")

Steps = Sequence[bytes]


def steps_of(body: Mapping[str, Any]) -> Steps:
    """Of the body of a completion or a chat: a hash for each whole step."""
    settings = [body.get(key) for key in _SETTINGS]
    text = "".join(_texts(body))[:_CHARS_MAX]
    found: list[bytes] = []
    before = orjson.dumps(settings)
    for end in range(STEP_CHARS, len(text) + 1, STEP_CHARS):
        step = text[end - STEP_CHARS : end].encode(errors="replace")
        before = xxhash.xxh3_128_digest(before + step)
        found.append(before)
    return found


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The pieces of a prompt in their order, as much as is looked at. What is appended to a chat
    leaves the text before it as it was."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if isinstance(prompt, str):
        yield prompt[:_CHARS_MAX]
    elif isinstance(prompt, list):
        yield "".join(f"{token}," for token in islice(prompt, _CHARS_MAX))
    messages = body.get("messages")
    if isinstance(messages, list):
        length = 0
        for piece in (body.get("tools"), body.get("documents"), *messages):
            yield (text := orjson.dumps(piece).decode())
            length += len(text)
            if length >= _CHARS_MAX:
                return


class PrefixBook:
    """What each engine was sent."""

    def __init__(self, engines: Sequence[Engine], steps_max: int = REMEMBERED_STEPS_MAX) -> None:
        self._steps_max = steps_max
        self._sent: dict[Engine, OrderedDict[bytes, None]] = {
            engine: OrderedDict() for engine in engines
        }

    def note(self, engine: Engine, steps: Steps) -> None:
        """`engine` was sent a prompt of these."""
        sent = self._sent[engine]
        # The last one first, so that what is forgotten first of a prompt is its end.
        for step in reversed(steps):
            sent[step] = None
            sent.move_to_end(step)
        while len(sent) > self._steps_max:
            sent.popitem(last=False)

    def common(self, engine: Engine, steps: Steps) -> int:
        """How many of `steps`, from the first on, `engine` was sent before."""
        sent = self._sent[engine]
        return next((at for at, step in enumerate(steps) if step not in sent), len(steps))

    def forget(self, engine: Engine) -> None:
        """It may have lost all that it had."""
        self._sent[engine].clear()

    def __repr__(self) -> str:
        return f"<PrefixBook {', '.join(f'{of}: {len(had)}' for of, had in self._sent.items())}>"
