"""A pytest plugin: puts our classes in the place of vLLM's, and writes down what became of tests.

Tests name vLLM's classes as globals of their modules, so that is where they are replaced, once all
modules are imported; vLLM itself is left as it is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

REPLACED = {
    "CPUOffloadingManager": ("stand_ins", "CpuManager"),
    "CPUPrimaryTierOffloadingManager": ("stand_ins", "PrimaryTier"),
    "TieringOffloadingManager": ("stand_ins", "TieredManager"),
    "TieringOffloadingSpec": ("tiering_connectors.vllm.offloading.spec", "TieredOffloadingSpec"),
    "FileSystemTierManager": ("fs_stand_in", "FsManager"),
}
OUTCOMES = "KVT_UPSTREAM_OUTCOMES"

_outcomes: dict[str, dict[str, str]] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        for name, (ours, cls) in REPLACED.items():
            if hasattr(module, name):
                setattr(module, name, getattr(__import__(ours, fromlist=[cls]), cls))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before = _outcomes.get(report.nodeid)
    if before is not None and (report.passed or before["outcome"] == "failed"):
        # Its set-up or its end went well, or it had failed by then.
        return
    why = str(report.longrepr).strip().splitlines()[-1] if report.failed else ""
    _outcomes[report.nodeid] = {"outcome": report.outcome, "why": why}


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))
