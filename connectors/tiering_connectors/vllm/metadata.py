"""The envelopes in which vLLM carries orders to its workers and their acknowledgements back.

vLLM asks for subclasses of its own; what is in them is `orders`, which knows nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiering_connectors.vllm.orders import Acknowledgements, StepOrders


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, one for each step."""

    orders: StepOrders


@dataclass(frozen=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler; vLLM adds up those of all ranks."""

    told: Acknowledgements

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        if not isinstance(other, WorkerMetadata):
            raise TypeError(f"acknowledgements cannot be added to a {type(other).__name__}")
        return WorkerMetadata(self.told.merged(other.told))
