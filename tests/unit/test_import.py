"""What `import tiering` costs: no heavy module, and next to no time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiering

HEAVY = {"aiofiles", "msgspec", "numpy", "orjson", "pydantic", "torch", "vllm", "xxhash"}
TOO_LONG_SECONDS = 0.3
# What extras and servers bring, by the names that are imported.
BROUGHT = ("aiobotocore", "aiohttp", "boto3", "botocore", "cuda", "hypothesis", "nixl", "obstore")
BROUGHT += ("pytest", "safetensors", "torch", "transformers", "triton", "vllm", "yarl", "zmq")


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
    code = (
        f"{statement}\nimport json, sys\nprint(json.dumps([m.split('.')[0] for m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def seconds_of(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=60)
    return time.perf_counter() - started


def test_importing_it_loads_nothing_heavy() -> None:
    assert loaded_by("import tiering").isdisjoint(HEAVY)


@pytest.mark.slow
def test_settings_and_errors_load_no_framework() -> None:
    statement = "from tiering import StoreConfig, FsTierConfig, ConfigError, GiB, __version__"
    assert loaded_by(statement).isdisjoint({"torch", "vllm", "triton"})


def test_the_command_loads_what_it_needs_when_it_needs_it() -> None:
    loaded = loaded_by("import tiering.cli\ntiering.cli._parser().format_help()")
    assert loaded.isdisjoint(HEAVY - {"orjson"})


def test_what_vllm_loads_in_each_process_loads_no_settings() -> None:
    statement = "import tiering_connectors.vllm.plugin, tiering_connectors.vllm.checking"
    assert loaded_by(statement).isdisjoint({"pydantic", "torch", "vllm"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "code", "told"),
    [
        ("tiering.cli", ["--help"], 0, ""),
        ("tiering_benchmarks.cli", ["--help"], 0, ""),
        (
            "tiering_benchmarks.cli",
            ["tiers", "--tier", "p2p"],
            2,
            "pyzmq; run pip install 'kv-tiering[p2p]'",
        ),
        ("tiering_benchmarks.cli", ["model", "unmade"], 2, "not installed: torch; run it in"),
    ],
)
def test_commands_without_any_extra(
    module: str, arguments: list[str], code: int, told: str, tmp_path: Path
) -> None:
    """They say what they are, and what is missing only to whoever needs it."""
    program = (
        f"import importlib.util, sys\n"
        f"sys.modules.update(dict.fromkeys({BROUGHT}))\n"
        f"find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name in {BROUGHT} else find(name)\n"
        f"from {module} import main\n"
        f"sys.exit(main({arguments}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert told in done.stderr


@pytest.mark.slow
def test_importing_it_takes_no_time() -> None:
    runs = [(seconds_of("import tiering"), seconds_of("pass")) for _ in range(5)]
    own = min(whole for whole, _ in runs) - min(bare for _, bare in runs)
    print(f"import tiering: {own * 1000:.0f} ms")
    assert own < TOO_LONG_SECONDS


def test_every_public_name_is_there() -> None:
    for name in tiering.__all__:
        value = getattr(tiering, name)
        if isinstance(value, type):
            assert value.__name__ == name
    assert set(tiering.__all__) <= set(dir(tiering))
    assert tiering.TiB == 1024 * tiering.GiB == 1024**2 * tiering.MiB == 1024**3 * tiering.KiB


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tiering' has no attribute 'Nothing'"):
        tiering.Nothing  # noqa: B018
