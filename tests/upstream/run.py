"""vLLM's own tests of KV offloading, run against our classes, and compared with what is expected.

Fetches vLLM's source distribution with pip, from wherever pip is configured to; unpacks the tests
named below into a temporary folder; runs them there with our classes in the place of vLLM's (see
`substitute`); and compares with `expected.toml`. It fails if a test differs that is not listed
there, or if one that is listed passes. Nothing of vLLM's is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.toml"
OUTCOMES = "KVT_UPSTREAM_OUTCOMES"

TESTS = (
    "tests/v1/kv_offload/cpu/test_manager.py",
    "tests/v1/kv_offload/tiering/test_tiering_offloading.py",
    "tests/v1/kv_offload/tiering/test_fs_tier.py",
    "tests/v1/kv_connector/unit/offloading_connector",
)
NEEDED = (
    "tests/__init__.py",
    "tests/v1/__init__.py",
    "tests/v1/kv_offload",
    "tests/v1/kv_connector/unit",
)
LEFT_OUT = ("test_canonical_mapping.py",)
"""Of the folders above: about what this engine does not offer."""

# pip wants a source distribution's metadata before it saves it, and vLLM's own build would need a
# compiler for it. This is a build that says no more than pip wants to know.
BUILD = """
import pathlib

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "vllm-{version}.dist-info"
    folder = pathlib.Path(metadata_directory, name)
    folder.mkdir()
    text = "Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n"
    folder.joinpath("METADATA").write_text(text)
    folder.joinpath("WHEEL").write_text("Wheel-Version: 1.0\\n")
    return name
"""


# Many of the tests describe an engine of this model, of which they need the shape and nothing else.
MODEL = "facebook/opt-125m"
MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "dtype": "float16",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
}


def fetch(release: str, folder: Path) -> Path:
    """The source distribution of vLLM `release`, in `folder`."""
    build = folder / "build" / "setuptools"
    build.mkdir(parents=True)
    build.joinpath("__init__.py").touch()
    build.joinpath("build_meta.py").write_text(BUILD.format(version=release))
    pip = [sys.executable, "-m", "pip", "download", "--quiet"]
    how = ["--no-deps", "--no-binary=vllm", "--no-build-isolation"]
    subprocess.run(
        [*pip, *how, f"--dest={folder}", f"vllm=={release}"],
        env={**os.environ, "PYTHONPATH": str(build.parent)},
        check=True,
    )
    (found,) = folder.glob("vllm-*.tar.gz")
    return found


def unpack(archive: Path, folder: Path) -> None:
    """Its tests that are needed here, and nothing else."""
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, path = member.name.partition("/")
            if member.isfile() and path.endswith(".py") and path.startswith(NEEDED):
                source = tar.extractfile(member)
                assert source is not None
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read())


def describe_model(folder: Path) -> Path:
    """A cache of the model hub in which MODEL has a configuration, so that nobody asks the hub."""
    home = folder / "hub"
    model = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    for name, text in (
        ("refs/main", "0"),
        ("snapshots/0/config.json", json.dumps(MODEL_CONFIG)),
    ):
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home


def run(folder: Path) -> dict[str, dict[str, str]]:
    """What became of each test, by its id."""
    told, log = folder / "outcomes.json", folder / "pytest.log"
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "ignore"]
    where = ["-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider", "-p", "substitute"]
    ignored = [f"--ignore-glob=*/{name}" for name in LEFT_OUT]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]),
        OUTCOMES: str(told),
        "HF_HOME": str(describe_model(folder)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        ended = subprocess.run(
            [*pytest, *where, *ignored, *TESTS],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not told.exists() or ended.returncode > 1:
        sys.exit(log.read_text()[-10000:])
    outcomes: dict[str, dict[str, str]] = json.loads(told.read_text())
    return outcomes


def expected() -> dict[str, str]:
    """By id of a test that differs, why it does."""
    differences = tomllib.loads(EXPECTED.read_text())["difference"]
    return {test: each["reason"] for each in differences for test in each["tests"]}


def compare(outcomes: dict[str, dict[str, str]], reasons: dict[str, str]) -> list[str]:
    """What is not as expected, in sentences."""
    failed = {test for test, told in outcomes.items() if told["outcome"] == "failed"}
    wrong = [
        f"{test} differs, and is not in {EXPECTED.name}: {outcomes[test]['why']}"
        for test in sorted(failed - reasons.keys())
    ]
    wrong += [
        f"{test} is in {EXPECTED.name}, but {outcomes[test]['outcome']}"
        for test in sorted(reasons.keys() & outcomes.keys() - failed)
    ]
    wrong += [
        f"{test} is in {EXPECTED.name}, but vLLM has no such test"
        for test in sorted(reasons.keys() - outcomes.keys())
    ]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", type=Path, help="vLLM's source distribution, if it is here")
    parser.add_argument("--keep", type=Path, help="an empty folder to leave everything in")
    given = parser.parse_args()
    release = version("vllm").partition("+")[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        archive = given.archive or fetch(release, folder)
        unpack(archive, folder)
        outcomes, reasons = run(folder), expected()
        wrong = compare(outcomes, reasons)
    counts = [
        sum(o["outcome"] == kind for o in outcomes.values()) for kind in ("passed", "skipped")
    ]
    print(
        f"vLLM {release}: {counts[0]} of its tests pass, {len(reasons)} differ for a known reason, "
        f"{counts[1]} do not apply on this machine"
    )
    for line in wrong:
        print(line)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
