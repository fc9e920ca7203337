"""What `tiering-bench serve` asks a server: three workloads, as arguments of `vllm bench serve`.

Every run of a workload asks the same prompts in the same order, whichever the side and repeat.
Traces are files of vLLM's `timed_trace` form, in which an id stands for one block of tokens after
all those before it. A recorded trace is cut to whole conversations, drawn by chance, and each of
its blocks is made one of ours, so that its pattern stays while its prompts shrink.
"""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tiering.errors import ConfigError

PREFIX, TRACE, TAX = "prefix", "trace", "tax"
REQUESTS = {PREFIX: 24, TRACE: 40, TAX: 16}
"""The workloads, and how many requests each has unless told otherwise."""
REQUESTS_MIN = 4

BLOCK_TOKENS = 32
PREFIX_TOKENS, SUFFIX_TOKENS, PROMPTS_PER_PREFIX = 2048, 64, 4
TAX_BLOCKS = PREFIX_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 8
TRACE_PROMPT_MAX, TRACE_ANSWER_MAX = 4096, 32
# vLLM's tokenizer may find a few tokens more in a prompt than were asked for.
SLACK_TOKENS = 2 * BLOCK_TOKENS

TURNS = (1, 6)
FIRST_BLOCKS, TURN_BLOCKS = (16, 48), (4, 16)
# Between two turns of a session, on average.
TURN_GAP_REQUESTS = 8
# A prefix that more than this share of all requests begin with is nobody's conversation.
COMMON_SHARE = 0.01
_SEED = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a trace: when, how long prompt and answer are, and the blocks of the prompt,
    the last of which may be a partial one."""

    seconds: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A workload. `arguments` are for `vllm bench serve`, with `trace`, if any, as its dataset; of
    what it asks, `longest_tokens` is the longest prompt with its answer, and `distinct_tokens` all
    that there is to keep."""

    name: str
    about: str
    arguments: tuple[str, ...]
    requests: int
    longest_tokens: int
    distinct_tokens: int
    trace: tuple[Asked, ...] = ()

    @property
    def model_len(self) -> int:
        """What the longest request needs, in whole blocks."""
        return -(-(self.longest_tokens + SLACK_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS


def prefix_load(requests: int, concurrency: int) -> Load:
    """Few long prefixes, each used several times, in random order."""
    prefixes = requests // PROMPTS_PER_PREFIX
    own_tokens = SUFFIX_TOKENS + ANSWER_TOKENS
    requests = prefixes * PROMPTS_PER_PREFIX
    return Load(
        PREFIX,
        f"{prefixes} prefixes of {PREFIX_TOKENS} tokens, {PROMPTS_PER_PREFIX} times each, "
        f"{concurrency} at a time",
        (
            "--dataset-name=prefix_repetition",
            f"--prefix-repetition-prefix-len={PREFIX_TOKENS}",
            f"--prefix-repetition-suffix-len={SUFFIX_TOKENS}",
            f"--prefix-repetition-num-prefixes={prefixes}",
            f"--prefix-repetition-output-len={ANSWER_TOKENS}",
            f"--max-concurrency={concurrency}",
        ),
        requests,
        PREFIX_TOKENS + own_tokens,
        prefixes * PREFIX_TOKENS + requests * own_tokens,
    )


def tax_load(requests: int, concurrency: int) -> Load:
    """Prompts with nothing in common. Not vLLM's own random ones: of a small vocabulary it now and
    then makes the same prompt twice."""
    asked = [
        Asked(
            0.0,
            TAX_BLOCKS * BLOCK_TOKENS,
            ANSWER_TOKENS,
            tuple(range(at * TAX_BLOCKS, (at + 1) * TAX_BLOCKS)),
        )
        for at in range(requests)
    ]
    about = (
        f"{requests} prompts of {PREFIX_TOKENS} tokens that never repeat, {concurrency} at a time"
    )
    more = ("--no-self-timed", f"--max-concurrency={concurrency}")
    return _of_trace(TAX, about, asked, more)


def trace_load(
    requests: int, interval_seconds: float, recorded: Path | None, block_tokens: int
) -> Load:
    """Sessions that come back, sent at the trace's times whether the server keeps up or not;
    `block_tokens` is what a block of a recorded one stands for there."""
    if recorded is None:
        asked, source = made_trace(requests), "a trace made here"
    else:
        rows = scaled(read_trace(recorded), block_tokens)
        asked, source = cut(rows, requests), f"of {recorded.name}"
    asked = paced(asked, interval_seconds)
    prompts = sum(each.input_tokens for each in asked)
    about = (
        f"{len(asked)} requests, {source}, {prompts} prompt tokens, one each "
        f"{interval_seconds:g} s on average"
    )
    return _of_trace(TRACE, about, asked, ())


def _of_trace(name: str, about: str, asked: Sequence[Asked], more: tuple[str, ...]) -> Load:
    blocks = {block for each in asked for block in each.blocks}
    return Load(
        name,
        about,
        (
            "--dataset-name=timed_trace",
            f"--timed-trace-chunk-hash-size={BLOCK_TOKENS}",
            *more,
        ),
        len(asked),
        max(each.input_tokens + each.output_tokens for each in asked),
        len(blocks) * BLOCK_TOKENS + sum(each.output_tokens for each in asked),
        tuple(asked),
    )


def trace_lines(asked: Sequence[Asked]) -> bytes:
    """As `timed_trace` reads them: a JSON object a line."""
    rows = (
        {
            "timestamp": each.seconds,
            "input_length": each.input_tokens,
            "output_length": each.output_tokens,
            "hash_ids": each.blocks,
        }
        for each in asked
    )
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def made_trace(requests: int) -> list[Asked]:
    """Sessions of a few turns, each turn with all of its past and something new; mixed, from a
    cold start. The unit of time is what passes between two requests."""
    chance = random.Random(_SEED)
    fresh = itertools.count()
    asked: list[Asked] = []
    for session in range(requests):
        seconds = (session + chance.random()) * sum(TURNS) / 2
        blocks = _next(fresh, chance.randint(*FIRST_BLOCKS))
        for _ in range(chance.randint(*TURNS)):
            answer = chance.randint(ANSWER_TOKENS, TRACE_ANSWER_MAX)
            asked.append(Asked(seconds, len(blocks) * BLOCK_TOKENS, answer, blocks))
            blocks += _next(fresh, chance.randint(*TURN_BLOCKS))
            seconds += chance.expovariate(1 / TURN_GAP_REQUESTS)
    return sorted(asked, key=lambda each: each.seconds)[:requests]


def _next(fresh: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(fresh) for _ in range(count))


def read_trace(file: Path) -> list[Asked]:
    """A trace in Mooncake's form, a JSON object a line with `timestamp` or `timestamp_ms` in
    milliseconds; packed with zstd if its name ends in .zst. ConfigError where it is not one."""
    try:
        return [_row(line) for line in _lines(file) if line.strip()]
    except OSError as error:
        reason, remedy = error.strerror or str(error), "name a file of requests"
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        reason, remedy = f"is no trace: {error!r}", "give one in Mooncake's form"
    raise ConfigError("--trace", str(file), reason, remedy)


def _row(line: bytes) -> Asked:
    row = msgspec.json.decode(line)
    milliseconds = row["timestamp_ms"] if "timestamp_ms" in row else row["timestamp"]
    session = row.get("session_id")
    return Asked(
        float(milliseconds) / 1000,
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(int(block) for block in row["hash_ids"]),
        None if session is None else str(session),
    )


def _lines(file: Path) -> Iterable[bytes]:
    if file.suffix != ".zst":
        return file.read_bytes().splitlines()
    unpack = shutil.which("zstd")
    if unpack is None:
        raise ConfigError("--trace", str(file), "needs the command zstd", "unpack it before")
    done = subprocess.run([unpack, "-dcq", "--long=27", str(file)], capture_output=True)
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace").strip())
    return done.stdout.splitlines()


def scaled(rows: Iterable[Asked], block_tokens: int) -> Iterator[Asked]:
    """With blocks of BLOCK_TOKENS, prompts and answers shorter by the same factor."""
    for row in rows:
        prompt = min(
            len(row.blocks) * BLOCK_TOKENS, -(-row.input_tokens * BLOCK_TOKENS // block_tokens)
        )
        answer = -(-row.output_tokens * BLOCK_TOKENS // block_tokens)
        yield replace(row, input_tokens=prompt, output_tokens=max(1, min(TRACE_ANSWER_MAX, answer)))


def cut(rows: Iterable[Asked], requests: int) -> list[Asked]:
    """Whole conversations, drawn by chance until there are `requests`; of the last one drawn as
    much as is wanted. Without those that have a prompt too long for this machine."""
    by_session = defaultdict(list)
    listed = [row for row in rows if row.input_tokens]
    for name, row in zip(_conversations(listed), listed, strict=True):
        by_session[name].append(row)
    small = [
        session
        for session in by_session.values()
        if max(row.input_tokens for row in session) <= TRACE_PROMPT_MAX
    ]
    random.Random(_SEED).shuffle(small)
    drawn = [row for session in small for row in session][:requests]
    if len(drawn) < REQUESTS_MIN:
        reason = f"has {len(drawn)} requests of up to {TRACE_PROMPT_MAX} tokens, scaled"
        raise ConfigError("--trace", f"{len(listed)} requests", reason, "give another")
    return sorted(drawn, key=lambda row: row.seconds)


def _conversations(rows: Sequence[Asked]) -> Iterator[str]:
    """For each row the name of its conversation: its own, or else the first block of it that is
    not common to many, as the blocks of a system's prompt are."""
    uses = Counter(block for row in rows for block in row.blocks)
    common = max(1.0, COMMON_SHARE * len(rows))
    for at, row in enumerate(rows):
        own = next((block for block in row.blocks if uses[block] <= common), None)
        yield row.session or (f"request {at}" if own is None else f"block {own}")


def paced(rows: Sequence[Asked], interval_seconds: float) -> list[Asked]:
    """From 0 on, at the same rhythm, with `interval_seconds` from one to the next on average."""
    first, last = rows[0].seconds, rows[-1].seconds
    factor = interval_seconds * (len(rows) - 1) / ((last - first) or 1.0)
    return [replace(row, seconds=(row.seconds - first) * factor) for row in rows]
