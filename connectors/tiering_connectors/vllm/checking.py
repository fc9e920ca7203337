"""What a user has written wrongly is refused where the user hears of it: before the engine.

vLLM makes its connector when the weights are loaded, in processes whose errors end up deep in a
log, and asks none about a request before the engine has it. So its InputProcessor, which is made
before the engine's processes, and refuses what else is wrong with a request, is made to look at
settings and at the roles of requests, too. Where it is another than we know, the connector still
refuses such settings, and the engine ignores such roles.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from tiering.errors import ConfigError
from tiering_connectors.vllm.roles import RoleError, Roles


def refuse_early() -> None:
    """Once for each process; it is called by vLLM's plugin entry point."""
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(InputProcessor, "checks_for_tiering", False):
        return
    _refuse_wrong_settings(InputProcessor)
    _refuse_wrong_roles(InputProcessor)
    InputProcessor.checks_for_tiering = True  # type: ignore[attr-defined]


def _refuse_wrong_settings(processor: Any) -> None:
    original = processor.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("vllm_config", args[0] if args else None)
        check_settings(getattr(given, "kv_transfer_config", None))
        original(self, *args, **kwargs)

    processor.__init__ = init


def _refuse_wrong_roles(processor: Any) -> None:
    original = processor.process_inputs

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

    processor.process_inputs = process_inputs


def check_settings(config: Any) -> None:
    """ConfigError if a KVTransferConfig has settings of one of our engines that cannot be used."""
    for where, extra in _engines(config):
        from tiering.config import ConnectorConfig, parse

        _require_memory(parse(ConnectorConfig, extra, where).cpu_bytes_to_use, where)


def _require_memory(wanted_bytes: int, where: str) -> None:
    """Only for what can never be had, as in a container that was given no more than the usual
    64 MiB: the region is whole rows, of which at least one fits, so over half of what is wanted."""
    from tiering.tiers.host import SHARED_MEMORY

    try:
        space = os.statvfs(SHARED_MEMORY)
    except OSError:
        return
    has_bytes = space.f_blocks * space.f_frsize
    if wanted_bytes // 2 > has_bytes:
        raise ConfigError(
            f"{where}.cpu_bytes_to_use",
            wanted_bytes,
            f"does not fit into {SHARED_MEMORY}, which has {has_bytes} bytes in all",
            f"lower it, or enlarge {SHARED_MEMORY} (in a container: docker's --shm-size, or "
            "--ipc=host)",
        )


def has_peers(config: Any) -> bool:
    """Whether a KVTransferConfig has one of our engines with a tier of type p2p."""
    return any(
        isinstance(tier, Mapping) and tier.get("type") == "p2p"
        for _, extra in _engines(config)
        for tier in _tiers(extra)
    )


def _engines(config: Any) -> list[tuple[str, object]]:
    if config is None:
        return []
    # Here and above: vLLM loads this in each of its processes, also where nobody asks for us.
    from tiering.config import engines

    return list(engines(config.kv_connector, config.kv_connector_extra_config))


def _tiers(extra: object) -> list[Any]:
    tiers = extra.get("secondary_tiers") if isinstance(extra, Mapping) else None
    return tiers if isinstance(tiers, list) else []


def _refusal(text: str) -> Exception:
    """What becomes status 400."""
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return ValueError(text)
    refusal: Exception = VLLMValidationError(text, parameter="kv_transfer_params")
    return refusal
