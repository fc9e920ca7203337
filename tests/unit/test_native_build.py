"""How the native engines are compiled, and what is said where they are not or are too old."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tiering_kernels import native
from tiering_kernels.chunkio import EngineUnavailable
from tiering_kernels.engines import open_engine

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "kernels" / "tiering_kernels" / "csrc"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `hatch_build`, with nothing set that it heeds."""
    for name in ("CC", "CFLAGS", "KV_TIERING_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_library_in_use_is_of_these_sources(build: ModuleType) -> None:
    """Otherwise: `python hatch_build.py`."""
    library = native._loaded(native.LIBRARY)
    assert library.kvt_sources().decode() == build.digest_of(SOURCES)


def test_the_sources_compile_without_a_warning(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFLAGS", "-Werror -Wshadow")
    assert build.compile_or_say_why_not(SOURCES, tmp_path / "native.so")
    assert os.listdir(tmp_path) == ["native.so"]


def test_without_io_uring_in_the_headers_there_are_threads(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFLAGS", "-DKVT_WITHOUT_URING -Werror")
    build.compile_library(SOURCES, tmp_path / "native.so")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "native.so")
    with pytest.raises(EngineUnavailable, match="the one that kv-tiering was built on"):
        open_engine("uring")
    assert open_engine().engine == "threads"


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_working_compiler_it_says_so_and_goes_on(
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler: str,
) -> None:
    old = tmp_path / "native.so"
    old.write_bytes(b"old")
    monkeypatch.setenv("CC", compiler)
    assert not build.compile_or_say_why_not(SOURCES, old)
    said = capsys.readouterr().err
    assert said.startswith(f"kv-tiering: without native code, disk tiers are slower: {compiler} ")
    assert said.count("\n") == 1
    assert os.listdir(tmp_path) == [], "an old library is still there"
    monkeypatch.setenv("KV_TIERING_NATIVE", "1")
    with pytest.raises(build.NotBuilt, match=compiler):
        build.compile_or_say_why_not(SOURCES, old)


def test_native_code_can_be_left_out(
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KV_TIERING_NATIVE", "0")
    assert not build.compile_or_say_why_not(SOURCES, tmp_path / "native.so")
    assert "KV_TIERING_NATIVE=0" in capsys.readouterr().err
    monkeypatch.setenv("KV_TIERING_NATIVE", "yes")
    with pytest.raises(build.NotBuilt, match="set it to 0 or 1"):
        build.compile_or_say_why_not(SOURCES, tmp_path / "native.so")


def test_only_linux_gets_native_code(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(build.NotBuilt, match="this is darwin"):
        build.compile_library(SOURCES, tmp_path / "native.so")


def test_without_a_library_the_portable_engine_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "native.so")
    with pytest.raises(EngineUnavailable, match="was not built; install a C compiler"):
        open_engine("threads")
    assert open_engine().engine == "portable"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("int kvt_abi(void) { return 0; }", "is of version 0, not"),
        ("int nothing;", "undefined symbol: kvt_abi"),
        (None, "cannot be loaded"),
    ],
)
def test_a_library_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, told: str
) -> None:
    library = tmp_path / "native.so"
    library.write_bytes(b"no library")
    if code is not None:
        (tmp_path / "old.c").write_text(code)
        command = ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "old.c")]
        subprocess.run(command, check=True)
    monkeypatch.setattr(native, "LIBRARY", library)
    with pytest.raises(EngineUnavailable, match=told):
        open_engine("threads")


# What the package's own functions look like, but wrong.
BAD_HASHES = """
#include <stdlib.h>
typedef struct { unsigned long long low, high; } value;
void *XXH3_createState(void) { return malloc(1); }
int XXH3_freeState(void *state) { free(state); return 0; }
int XXH3_128bits_reset(void *state) { (void)state; return 0; }
int XXH3_128bits_update(void *state, const void *data, size_t bytes)
    { (void)state, (void)data, (void)bytes; return 0; }
value XXH3_128bits_digest(const void *state) { (void)state; return (value){1, 2}; }
"""


@pytest.mark.parametrize("code", [BAD_HASHES, "int nothing;"])
def test_a_checksum_that_is_missing_or_differs_is_not_used(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "hashes.c").write_text(code)
    hashes = str(tmp_path / "hashes.so")
    command = ["cc", "-shared", "-fPIC", "-o", hashes, str(tmp_path / "hashes.c")]
    subprocess.run(command, check=True)
    own = native._xxhash_extension()
    build.compile_library(SOURCES, tmp_path / "native.so")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "native.so")
    monkeypatch.setattr(native, "_xxhash_extension", lambda: hashes)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(EngineUnavailable, match="neither the xxhash package nor a system library"):
        open_engine("threads")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: own)
    assert open_engine("threads").engine == "threads"


def test_a_wheel_has_the_library_and_not_its_sources_and_an_sdist_the_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hatchling", reason="hatchling, which builds wheels, is not installed")
    for name in ("CC", "CFLAGS", "KV_TIERING_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    # A copy: what is built must not depend on what lies about, nor touch it.
    project = tmp_path / "project"
    kept = shutil.ignore_patterns(".*venv", ".git", ".*_cache", "__pycache__", "tests", "docs")
    shutil.copytree(REPOSITORY, project, ignore=kept)
    shutil.copy(REPOSITORY / ".gitignore", project)

    def built(target: str, **environment: str) -> Path:
        out = tmp_path / "-".join([target, *environment.values()])
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
        env = {**os.environ, **environment}
        subprocess.run(command, cwd=project, check=True, capture_output=True, env=env)
        (path,) = out.iterdir()
        return path

    with_library = built("wheel")
    assert "-py3-none-linux_" in with_library.name
    archive = zipfile.ZipFile(with_library)
    names = archive.namelist()
    (said,) = [archive.read(name) for name in names if name.endswith("dist-info/WHEEL")]
    assert b"Root-Is-Purelib: false" in said
    assert "tiering_kernels/_native.so" in names
    assert not [name for name in names if "csrc" in name]
    without = built("wheel", KV_TIERING_NATIVE="0")
    assert without.name.endswith("-py3-none-any.whl")
    assert sorted(names) == sorted(
        [*zipfile.ZipFile(without).namelist(), "tiering_kernels/_native.so"]
    )
    source = built("sdist")
    listed = subprocess.run(["tar", "tzf", str(source)], check=True, capture_output=True, text=True)
    assert "kernels/tiering_kernels/csrc/ring.c" in listed.stdout
    assert "hatch_build.py" in listed.stdout
    assert "_native.so" not in listed.stdout
