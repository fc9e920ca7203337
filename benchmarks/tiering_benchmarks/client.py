"""Asks a running vLLM server, over its own HTTP interface: completions, metrics, resets.

Owns no process and keeps no connection: each call opens one and closes it. Blocking; a client may
be shared by threads. Knows nothing about how the server was started, so it serves for one on
another machine as well.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiering.errors import TieringError

CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"


class RequestFailed(TieringError):
    """The server answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What came back for one prompt. `logprobs` are those of the chosen tokens, if asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Client:
    """A server at `host`:`port` that serves one model under the name `model`."""

    host: str
    port: int
    model: str
    timeout_seconds: float = 300.0

    def is_healthy(self) -> bool:
        """Whether the server is up and its engine alive."""
        try:
            with self._request("GET", "/health"):
                return True
        except RequestFailed:
            return False

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int, *, logprobs: bool = False, **extra: Any
    ) -> Completion:
        """Complete `prompt` (text, or token ids taken as they are) greedily.

        Exactly `max_tokens` tokens come back. `extra` goes into the request as it is, such as
        `cache_salt` or `kv_transfer_params`. Cached tokens are told only by a server started
        with --enable-prompt-tokens-details, and are 0 otherwise.
        """
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1 if logprobs else None,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        began = time.perf_counter()
        first: float | None = None
        pieces: list[dict[str, Any]] = []
        usage: dict[str, Any] = {}
        with self._request("POST", "/v1/completions", body) as response:
            for event in _events(response):
                if "error" in event:
                    raise RequestFailed(f"the server gave up on the request: {event['error']}")
                usage = event.get("usage") or usage
                for piece in event["choices"]:
                    if first is None:
                        first = time.perf_counter()
                    pieces.append(piece)
        ended = time.perf_counter()
        if first is None or not usage:
            raise RequestFailed("the server closed the stream before the answer was whole")
        return Completion(
            text="".join(piece["text"] for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece["token_ids"] or ()),
            logprobs=tuple(
                value
                for piece in pieces
                if piece.get("logprobs")
                for value in piece["logprobs"]["token_logprobs"]
            ),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            first_token_seconds=first - began,
            total_seconds=ended - began,
        )

    def metrics(self) -> dict[str, float]:
        """Every sample at /metrics, engines and models added up.

        Keyed by the sample's name, with any further labels in order of their names, such as
        `vllm:prompt_tokens_cached_by_source_total{source="host"}`.
        """
        # With vLLM comes the library that wrote the page.
        from prometheus_client.parser import text_string_to_metric_families

        with self._request("GET", "/metrics") as response:
            page = response.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = [
                    f'{name}="{value}"'
                    for name, value in sorted(sample.labels.items())
                    if name not in ("engine", "model_name")
                ]
                key = f"{sample.name}{{{','.join(labels)}}}" if labels else sample.name
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def cached_by_source(self) -> dict[str, int]:
        """Prompt tokens since the server's start that were not computed, by where they came from.

        Sources are vLLM's: device, host, p2p, disk, external_unspecified.
        """
        prefix, suffix = f'{CACHED_BY_SOURCE}{{source="', '"}'
        return {
            key.removeprefix(prefix).removesuffix(suffix): int(value)
            for key, value in self.metrics().items()
            if key.startswith(prefix)
        }

    def reset_prefix_cache(self) -> None:
        """Empty the device's cache. Needs a server started with VLLM_SERVER_DEV_MODE=1."""
        with self._request("POST", "/reset_prefix_cache"):
            pass

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        where = f"{method} {path} at {self.host}:{self.port}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_seconds)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                answer = response.read().decode(errors="replace").strip()
                raise RequestFailed(f"{where}: {response.status} {answer[:500]}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"{where}: {type(error).__name__} {error}") from error
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to its [DONE]."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
