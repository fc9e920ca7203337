"""The Triton kernel for small pages: in its interpreter on the CPU, and what it compiles to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = ("torch", "triton")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in MODULES),
        reason="needs torch and Triton: `make test` installs both, on Linux for x86",
    ),
]

# For a GPU that is not here; the assembler comes with Triton.
COMPILE = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from tiering_kernels.triton_pages import _copy_pages

pointers = {"table": "*i64", "indices": "*i32"}
numbers = dict.fromkeys(["count", "layers", "blocks", "rows", "per_chunk"], "i32")
addresses = dict.fromkeys(["row_address", "row_stride"], "i64")
for word in (16, 8):
    for is_load in (True, False):
        constants = {"IS_LOAD": is_load, "WORD": word, "WORDS": 1024, "FIELDS": 4}
        signature = pointers | numbers | addresses | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=_copy_pages, signature=signature, constexprs=constants)
        made = compile(source, target=GPUTarget("cuda", 90, 32))
        stores = sorted(set(re.findall(r"st\\.global\\S*", made.asm["ptx"])))
        print(word, is_load, stores, len(made.asm["cubin"]) > 0)
"""

# What a launch looks up, on a device that is none: nothing is launched.
LOOK_UP = """
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tiering_kernels.triton_pages import _copy_pages

driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
)
for count in (0, 1, 16, 17, 1000):
    _copy_pages.warmup(
        *(torch.int64, torch.int32, count, 3, 5000, 700, 4, 1 << 46, 1 << 21),
        **{"IS_LOAD": True, "WORD": 16, "WORDS": 64, "FIELDS": 4, "grid": (1,)},
    )
print(len(_copy_pages.device_caches[0][0]))
"""


def output_of(*command: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_copies_what_the_plain_loops_copy() -> None:
    """For words of every size, odd strides, several groups of layers, bounds and empty lists."""
    told = output_of(str(HERE / "triton_cases.py"), TRITON_INTERPRET="1")
    assert told[-1] == "all as the plain loops"
    assert len(told) == 25


def test_it_compiles_for_a_gpu_with_accesses_of_16_bytes(tmp_path: Path) -> None:
    program = tmp_path / "compile_pages.py"
    program.write_text(COMPILE)
    assert output_of(str(program), TRITON_CACHE_DIR=str(tmp_path)) == [
        "16 True ['st.global.v2.b64'] True",
        "16 False ['st.global.v2.b64'] True",
        "8 True ['st.global.b64'] True",
        "8 False ['st.global.b64'] True",
    ]


def test_copies_of_any_length_need_no_other_code_than_was_compiled_at_start(
    tmp_path: Path,
) -> None:
    """Triton makes other code for a number that is 1, or that 16 divides, unless it is told not
    to: the first loads would wait for a compiler."""
    program = tmp_path / "look_up.py"
    program.write_text(LOOK_UP)
    assert output_of(str(program), TRITON_CACHE_DIR=str(tmp_path)) == ["1"]
