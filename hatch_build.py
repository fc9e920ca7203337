"""Compiles `kernels/tiering_kernels/csrc` while a wheel is built, or in place for an editable one.

Run by hatchling; `python hatch_build.py` compiles in place by hand. Without Linux or a working
compiler the package is built without native code, and says so; KV_TIERING_NATIVE=1 makes that an
error, KV_TIERING_NATIVE=0 leaves native code out. $CC and $CFLAGS are heeded.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # by hand, without hatchling
    BuildHookInterface = object

PACKAGE = Path("kernels/tiering_kernels")
LIBRARY = "_native.so"
FLAGS = (
    *("-O3", "-std=gnu11", "-Wall", "-Wextra"),
    *("-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
)


class NotBuilt(Exception):
    """There is no native code; says why."""


class NativeBuildHook(BuildHookInterface):
    """Puts the compiled library into the wheel, which is then one for this platform only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="kv-tiering-build-")
        root = Path(self.root)
        editable = version == "editable"
        target = (root / PACKAGE if editable else Path(self._scratch.name)) / LIBRARY
        if not compile_or_say_why_not(root / PACKAGE / "csrc", target) or editable:
            return
        build_data["force_include"][str(target)] = f"{PACKAGE.name}/{LIBRARY}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._scratch.cleanup()


def compile_or_say_why_not(sources: Path, target: Path) -> bool:
    """Whether `target` was built; NotBuilt where it was not and KV_TIERING_NATIVE=1 is set."""
    wanted = os.environ.get("KV_TIERING_NATIVE", "")
    if wanted not in ("", "0", "1"):
        raise NotBuilt(f"KV_TIERING_NATIVE is {wanted!r}: set it to 0 or 1, or not at all")
    try:
        if wanted == "0":
            raise NotBuilt("KV_TIERING_NATIVE=0")
        compile_library(sources, target)
    except NotBuilt as reason:
        if wanted == "1":
            raise
        target.unlink(missing_ok=True)  # an old one would be used
        print(f"kv-tiering: without native code, disk tiers are slower: {reason}", file=sys.stderr)
        return False
    return True


def compile_library(sources: Path, target: Path) -> None:
    """Compile the C files of `sources` to `target`; it may be in use, so it is replaced whole."""
    if not sys.platform.startswith("linux"):
        raise NotBuilt(f"it is for Linux, this is {sys.platform}")
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    command = [
        *_compiler(),
        *FLAGS,
        f'-DKVT_SOURCES="{digest_of(sources)}"',
        *shlex.split(os.environ.get("CFLAGS", "")),
        *map(str, sorted(sources.glob("*.c"))),
        *("-o", str(scratch)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise NotBuilt(f"{command[0]} failed: {last}")
        sys.stderr.write(done.stderr)  # warnings
        scratch.replace(target)
    except OSError as error:
        raise NotBuilt(f"{command[0]} cannot be run: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def digest_of(sources: Path) -> str:
    """What the library says it was built from."""
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compiler() -> list[str]:
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise NotBuilt("there is no C compiler: install gcc or clang, or set CC")


if __name__ == "__main__":
    os.environ.setdefault("KV_TIERING_NATIVE", "1")
    package = Path(__file__).parent / PACKAGE
    try:
        compile_or_say_why_not(package / "csrc", package / LIBRARY)
    except NotBuilt as reason:
        sys.exit(f"kv-tiering: no native code: {reason}")
