"""Which rows of the host tier a copy is for: what the scheduler's side hands to the workers.

Plain data, pickled between vLLM's processes inside `envelopes.RowsSpec`. vLLM passes it on beside
its own list of device blocks, which is in the same order: by KV cache group, and by position
within a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiering.keys import split_key


@dataclass(frozen=True, slots=True)
class Rows:
    """`slots` are rows of the host tier, int32, one for each chunk, group by group; `chunks[g]` of
    them are of the g-th group that vLLM offloads. `number` counts the loads of an engine from 1,
    in the order in which workers get them; a store has none."""

    slots: npt.NDArray[np.int32]
    chunks: tuple[int, ...]
    number: int = 0

    @classmethod
    def of(
        cls, slots: Sequence[int], keys: Iterable[bytes], groups: Sequence[int], number: int = 0
    ) -> Rows:
        """For `keys` in this order, `groups` being KV cache groups by vLLM's own index."""
        counts = dict.fromkeys(groups, 0)
        for key in keys:
            counts[split_key(key)[1]] += 1
        return cls(np.array(slots, dtype=np.int32), tuple(counts.values()), number)
