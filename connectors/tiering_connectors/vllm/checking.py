"""Requests whose roles cannot be meant are refused where clients hear of it: before the engine.

vLLM asks no connector about a request before the engine has it, where it is too late for an answer
that a client could read. So its InputProcessor, which refuses what else is wrong with a request, is
made to look at this, too; where it is another than we know, the engine still ignores such roles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from tiering_connectors.vllm.roles import RoleError, Roles

_OURS = ("TieredConnector", "TieredOffloadingSpec")


def refuse_wrong_roles() -> None:
    """Once for each process; it is called by vLLM's plugin entry point."""
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if getattr(original, "checks_roles", False):
        return

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("params", args[2] if len(args) > 2 else None)
        told = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
        if told and has_peers(getattr(self.vllm_config, "kv_transfer_config", None)):
            try:
                Roles.of(told)
            except RoleError as error:
                raise _refusal(str(error)) from None
        return original(self, *args, **kwargs)

    process_inputs.checks_roles = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs  # type: ignore[method-assign]


def has_peers(config: Any) -> bool:
    """Whether a KVTransferConfig has one of our engines with a tier of type p2p."""
    if config is None:
        return False
    return any(
        (name in _OURS or extra.get("spec_name") in _OURS)
        and any(isinstance(t, Mapping) and t.get("type") == "p2p" for t in _tiers(extra))
        for name, extra in _connectors(config.kv_connector, config.kv_connector_extra_config)
    )


def _connectors(name: Any, extra: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """It, and those that a MultiConnector has."""
    if not isinstance(extra, Mapping):
        return
    yield name, extra
    nested = extra.get("connectors")
    for each in nested if isinstance(nested, list) else ():
        if isinstance(each, Mapping):
            yield from _connectors(each.get("kv_connector"), each.get("kv_connector_extra_config"))


def _tiers(extra: Mapping[str, Any]) -> list[Any]:
    tiers = extra.get("secondary_tiers")
    return tiers if isinstance(tiers, list) else []


def _refusal(text: str) -> Exception:
    """What becomes status 400."""
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return ValueError(text)
    refusal: Exception = VLLMValidationError(text, parameter="kv_transfer_params")
    return refusal
