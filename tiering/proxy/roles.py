"""What the protocol of peers has a router say: the roles of a request, and the bodies with them.

Together with the words of `tiering.peers.roles` this is the whole of what a router has to know; the
guide for operators, docs/p2p.md, has them in a table. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tiering.peers.roles import DECODER, HOST, ID, PORT, PREFILLER, ROLES, SOURCE
from tiering.proxy.engines import Engine
from tiering.proxy.prefixes import Steps, steps_of

PARAMS = "kv_transfer_params"

Role = dict[str, dict[str, Any]]
"""One of ROLES, and its fields. Of several in one request, only a decoder and a source go
together."""

# What has a prefiller answer more than a token, or compute anything but the prompt.
_NOT_FOR_A_PREFILL = (
    *("stream_options", "min_tokens", "n", "best_of", "use_beam_search"),
    *("echo", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs"),
)


def remote_decoder(kv_request_id: str) -> Role:
    """To a prefiller: a decoder will come for what this request computes."""
    return {DECODER: {ID: kv_request_id}}


def remote_prefiller(kv_request_id: str, prefiller: Engine) -> Role:
    """To a decoder: `prefiller` computes the prompt, under the same id."""
    return {PREFILLER: _at(kv_request_id, prefiller)}


def remote_kv_source(kv_request_id: str, source: Engine) -> Role:
    """To an engine: `source` may have the beginning of the prompt."""
    return {SOURCE: _at(kv_request_id, source)}


def _at(kv_request_id: str, engine: Engine) -> dict[str, Any]:
    return {
        ID: kv_request_id,
        HOST: engine.peer.host,
        PORT: engine.peer.port,
    }


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that goes to no engine: `status` of HTTP, and a sentence for the client."""

    status: int
    reason: str
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion or a chat as a client sent it: `raw` is what `body` was read from, `steps` what
    its prompt begins with."""

    raw: bytes
    body: dict[str, Any]
    steps: Steps

    @property
    def is_one_prompt(self) -> bool:
        """Several prompts in one request would all be under one kv_request_id, which stands for
        one transfer: they get no roles."""
        prompt = self.body.get("prompt")
        is_several = isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int
        return not is_several and self.body.get("prompt_embeds") is None

    def with_role(self, role: Role) -> bytes:
        """For the engine that answers; without a role, as it came."""
        return orjson.dumps(self._with(role)) if role else self.raw

    def for_prefill(self, role: Role) -> bytes:
        """For a prefiller: the same prompt, and as little of an answer as there can be."""
        body = {
            key: value for key, value in self._with(role).items() if key not in _NOT_FOR_A_PREFILL
        }
        body |= {"stream": False, "max_tokens": 1}
        if body.get("max_completion_tokens") is not None:
            body["max_completion_tokens"] = 1
        return orjson.dumps(body)

    def _with(self, role: Role) -> dict[str, Any]:
        return self.body | {PARAMS: (self.body.get(PARAMS) or {}) | role}


def read(raw: bytes) -> Asked | Refusal:
    """A body of a completion or a chat."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return Refusal(400, f"the body is no JSON: {error}")
    if not isinstance(body, dict):
        return Refusal(400, "the body is no JSON object")
    return refusal_of(body) or Asked(raw, body, steps_of(body))


def refusal_of(body: Mapping[str, Any]) -> Refusal | None:
    """Why a body cannot be passed on: it says by itself from where chunks come."""
    params = body.get(PARAMS)
    if params is None:
        return None
    if not isinstance(params, dict):
        return Refusal(400, f"{PARAMS} must be an object", PARAMS)
    given = [role for role in ROLES if role in params]
    if given:
        told = f"{PARAMS}.{given[0]}: the proxy decides from where chunks come; leave it out"
        return Refusal(400, told, f"{PARAMS}.{given[0]}")
    return None


def refusal_of_other(raw: bytes) -> Refusal | None:
    """The same for a request of another kind, whose body may be anything."""
    if not raw.lstrip().startswith(b"{"):
        return None
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return refusal_of(body)
