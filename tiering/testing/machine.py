"""A Hypothesis state machine that runs any tier against a dict. Used by `TierContract`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tiering.testing.examples import blank, key_number, payload_of, scanned, views
from tiering.tiers.base import Delete, Read, Tier, Write


class TierMachine(RuleBasedStateMachine):
    """Random batches on a tier and on a dict, which must agree on every key."""

    numbers = st.lists(st.integers(0, 7), max_size=5, unique=True)

    def __init__(self, make_tier: Callable[[], Tier]) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.make_tier = make_tier
        self.tier = make_tier()
        self.model: dict[bytes, bytes] = {}
        self.runner.run(self.tier.open())

    @rule(numbers=numbers)
    def write(self, numbers: list[int]) -> None:
        keys = [key_number(number) for number in numbers]
        expected = [Write.ALREADY_THERE if key in self.model else Write.STORED for key in keys]
        payloads = [payload_of(key) for key in keys]
        assert self.runner.run(self.tier.write(keys, views(payloads))) == expected
        self.model.update(zip(keys, payloads, strict=True))

    @rule(numbers=numbers)
    def read(self, numbers: list[int]) -> None:
        keys, buffers = [key_number(number) for number in numbers], blank(len(numbers))
        outcomes = self.runner.run(self.tier.read(keys, buffers))
        found = [
            bytes(buffer) if outcome is Read.HIT else outcome
            for outcome, buffer in zip(outcomes, buffers, strict=True)
        ]
        assert found == [self.model.get(key, Read.MISS) for key in keys]

    @rule(numbers=numbers)
    def contains(self, numbers: list[int]) -> None:
        keys = [key_number(number) for number in numbers]
        expected = [Read.HIT if key in self.model else Read.MISS for key in keys]
        assert self.runner.run(self.tier.contains(keys)) == expected

    @rule(numbers=numbers)
    def delete(self, numbers: list[int]) -> None:
        keys = [key_number(number) for number in numbers]
        expected = [Delete.DELETED if key in self.model else Delete.MISSING for key in keys]
        assert self.runner.run(self.tier.delete(keys)) == expected
        for key in keys:
            self.model.pop(key, None)

    @rule()
    def scan(self) -> None:
        assert self.runner.run(scanned(self.tier)) == sorted(self.model)

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.tier.close())
        self.tier = self.make_tier()
        self.runner.run(self.tier.open())

    def teardown(self) -> None:
        self.runner.run(self.tier.close())
        self.runner.close()
