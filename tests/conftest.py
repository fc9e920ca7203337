"""For all tests: asserts of the shipped test helpers explain themselves like those of tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tiering.testing.contract", "tiering.testing.examples", "tiering.testing.machine"
)
