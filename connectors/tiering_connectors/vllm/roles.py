"""What a request has to do with other engines: the roles in its `kv_transfer_params`.

Owns which of them go together and what their fields must be: `remote_prefiller` and
`remote_kv_source` say where chunks come from, `remote_decoder` for whom they are kept. Pure.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tiering.errors import ConfigError
from tiering.peers.addresses import address
from tiering.peers.messages import REQUEST_ID_CHARS_MAX
from tiering.peers.roles import DECODER, HOST, ID, PORT, PREFILLER, ROLES, SOURCE
from tiering.tiers.peers.source import PeerSource

_WHY = {
    DECODER: "contradict one another: a request is prefilled here, or elsewhere",
    SOURCE: "are two sources for the same chunks",
}


class RoleError(ValueError):
    """The roles of a request cannot be meant; its text names the key and the way out."""


@dataclass(frozen=True, slots=True)
class Roles:
    """`whom`: the engine that the request may have chunks from. `kept_as`: the orchestrator's id
    under which what it computes is kept for another one."""

    whom: PeerSource | None = None
    kept_as: str | None = None

    @classmethod
    def of(cls, params: object) -> Self:
        """RoleError for what cannot be meant. Keys that are null are as good as left out."""
        if params is not None and not isinstance(params, Mapping):
            # A client of vLLM's can send that, under `vllm_xargs`, which is not looked at.
            raise RoleError(f"kv_transfer_params = {reprlib.repr(params)}: must be an object")
        given = {role: params[role] for role in ROLES if params and params.get(role) is not None}
        if PREFILLER in given:
            for other, why in _WHY.items():
                if other in given:
                    raise RoleError(
                        f"kv_transfer_params: {PREFILLER} and {other} {why}; leave out one of them "
                        f"(only {DECODER} and {SOURCE} go together)"
                    )
        whom = kept_as = None
        for role in (PREFILLER, SOURCE):
            if role in given:
                whom = _whom(role, given[role])
        if DECODER in given:
            kept_as = _request_id(DECODER, _fields(DECODER, given[DECODER]))
        return cls(whom, kept_as)


NO_ROLES = Roles()


def _whom(role: str, value: object) -> PeerSource:
    fields = _fields(role, value)
    host, port = fields.get(HOST), fields.get(PORT)
    if not isinstance(host, str):
        raise _wrong(role, HOST, host, "must be text: the host of the peer's control socket")
    if type(port) is not int or port < 1:
        raise _wrong(role, PORT, port, "must be a whole number: that socket's port")
    try:
        at = address(HOST, host, port)
    except ConfigError as error:
        key = HOST if error.path == HOST else PORT
        raise _wrong(role, key, fields[key], f"{error.reason}; {error.remedy}") from None
    return PeerSource(at.host, at.port, _request_id(role, fields), role == PREFILLER)


def _request_id(role: str, fields: Mapping[str, Any]) -> str:
    value = fields.get(ID)
    if not isinstance(value, str) or not 0 < len(value) <= REQUEST_ID_CHARS_MAX:
        told = f"must be text of 1 to {REQUEST_ID_CHARS_MAX} characters, the same for both engines"
        raise _wrong(role, ID, value, told)
    try:
        value.encode()
    except UnicodeEncodeError:  # as JSON may say, and no message between engines can
        raise _wrong(role, ID, value, "has half a character, which UTF-8 cannot have") from None
    return value


def _fields(role: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RoleError(f"kv_transfer_params.{role} = {reprlib.repr(value)}: must be an object")
    return value


def _wrong(role: str, key: str, value: object, reason: str) -> RoleError:
    return RoleError(f"kv_transfer_params.{role}.{key} = {reprlib.repr(value)}: {reason}")
