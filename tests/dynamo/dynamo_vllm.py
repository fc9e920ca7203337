"""`python -m dynamo.vllm` on a CPU: the same command line, run by `scenario.py`.

Dynamo 1.6.1 imports two things for other uses than ours which vLLM 0.32's CPU build does not have:
addresses of engines for embedding workers, and an image processor that needs torchvision. Something
stands in for each that can be imported and not be used.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from types import ModuleType
from typing import Any, NoReturn

MISSING = {
    "vllm.v1.engine.utils": ("get_engine_zmq_addresses",),
    "transformers.models.qwen2_vl.image_processing_qwen2_vl": ("smart_resize",),
}


def _is_missing(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("only its import is stood in for")


def stand_in() -> None:
    for name, attributes in MISSING.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            module = sys.modules[name] = ModuleType(name)
        for attribute in attributes:
            if not hasattr(module, attribute):
                setattr(module, attribute, _is_missing)


# The engine's own processes import this file again, and need nothing of it.
if __name__ == "__main__":
    stand_in()
    sys.argv[0] = "dynamo.vllm"
    runpy.run_module("dynamo.vllm", run_name="__main__")
