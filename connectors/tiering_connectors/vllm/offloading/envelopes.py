"""The envelope in which vLLM carries rows to its workers: it asks for a subclass of its own."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec

from tiering_connectors.vllm.offloading.rows import Rows


@dataclass(frozen=True, slots=True)
class RowsSpec(LoadStoreSpec):
    """Manager to workers."""

    rows: Rows


def rows_of(spec: LoadStoreSpec) -> Rows:
    if not isinstance(spec, RowsSpec):
        raise TypeError(f"RowsSpec was expected, not {type(spec).__name__}")
    return spec.rows
