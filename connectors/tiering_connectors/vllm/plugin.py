"""vLLM's plugin entry point: makes the connector loadable by its name alone.

Called in every vLLM process of an environment that has this package, also those that never use
it: it only registers, imports nothing that vLLM does not, and never raises.
"""

from __future__ import annotations

import logging

NAME = "TieredConnector"
MODULE = "tiering_connectors.vllm.connector"


def register() -> None:
    """The entry point."""
    register_connector()
    try:
        from tiering_connectors.vllm.checking import refuse_early

        refuse_early()
    except Exception as error:
        # The connector refuses settings then, and the engine ignores roles, and says so.
        logging.getLogger("tiering").debug("nothing is checked before the engine: %s", error)


def register_connector() -> None:
    """Tell vLLM's connector factory where `TieredConnector` is, once per process."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except Exception as error:
        logging.getLogger("tiering").warning(
            "%s could not be registered with this vLLM (%s): "
            'give "kv_connector_module_path": "%s" instead',
            NAME,
            error,
            MODULE,
        )
