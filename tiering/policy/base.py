"""The contract of an eviction policy: it orders the keys that are resident, and nothing else.

Sans-IO and not thread-safe: owned by `residency`. A policy is told of an *access*, one request's
use of a prefix, by its number; accesses grow with time, and one access counts once however often
it is reported. Keys come in prefix order, head first, and a policy must give up the tail of a
prefix before its head: a chunk whose parent is gone can never be matched again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


class EvictionPolicy(ABC):
    """What an implementor must write; nothing here has a default. All calls are O(batch)."""

    @abstractmethod
    def __init__(self, capacity: int) -> None:
        """`capacity`: how many keys can be resident at most."""

    @abstractmethod
    def add(self, keys: Sequence[bytes], access: int) -> None:
        """`keys` became resident, for the request behind `access`."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes], access: int) -> None:
        """`keys`, all resident, were used by the request behind `access`."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """`keys`, all resident, are not any more."""

    @abstractmethod
    def pick(self, count: int, evictable: Callable[[Sequence[bytes]], list[bool]]) -> list[bytes]:
        """Up to `count` victims among the keys that `evictable`, asked for some of them at once,
        says yes to; first to go first.

        Changes nothing that can be observed: the caller calls `remove` for those it evicts.
        """

    @abstractmethod
    def order(self) -> list[bytes]:
        """Every resident key in the order in which they would go. For tests; may be slow."""
