"""The command `tiering`: what it prints, its exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import mmap
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import segment_places
from tiering.cli import main
from tiering.config import EXTRA_CONFIG
from tiering.keys import chunk_key
from tiering.testing.examples import example_namespace, stored
from tiering.tiers.disk import mounts
from tiering.tiers.disk.diskio import Direct
from tiering.tiers.files.tier import FsTier
from tiering_kernels.chunkio import ChunkIo, EngineUnavailable
from tiering_kernels.engines import open_engine

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {
    "cpu_bytes_to_use": 10 << 30,
    "block_size": 64,
    "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv"}],
}
WHOLE = {"kv_connector": "TieredConnector", "kv_role": "kv_both", "kv_connector_extra_config": GOOD}
STORE = {
    "cpu_bytes_to_use": 1 << 20,
    "layout": {"layers": 2, "kv_heads": 1, "head_dim": 64, "block_tokens": 16},
}

NAMESPACE = example_namespace(model="acme/tiny", tp_size=2, share_bytes=4096, ranks=2)

Output = pytest.CaptureFixture[str]


def command(
    *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """A real run of the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tiering", *arguments],
        capture_output=True,
        timeout=60,
        check=False,
        env=env,
    )


def columns(output: str) -> dict[str, list[str]]:
    """The lines of a table by their first cell; cells are two spaces apart or more."""
    lines = [line.split("  ") for line in output.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {line[0]: line[1:] for line in cells if line}


def test_config_shows_each_value_and_where_it_comes_from(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "kv.json"
    path.write_text(json.dumps(GOOD))
    assert main(["config", str(path)]) == 0
    out, err = capsys.readouterr()
    table = columns(out)
    assert out.startswith("valid connector configuration\n")
    assert table["cpu_bytes_to_use"] == ["10737418240 (10 GiB)", "file"]
    assert table["secondary_tiers[0].root_dir"] == ['"/mnt/kv"', "file"]
    assert table["secondary_tiers[0].n_read_threads"] == ["16", "default"]
    assert table["blocks_per_chunk"] == ["null", "default"]
    assert err == ""


def test_config_shows_each_of_several_engines(capsys: Output) -> None:
    second = {"kv_connector": "OffloadingConnector"}
    second |= {EXTRA_CONFIG: {"spec_name": "TieredOffloadingSpec", "cpu_bytes_to_use": 1 << 20}}
    several = {"kv_connector": "MultiConnector", EXTRA_CONFIG: {"connectors": [WHOLE, second]}}
    assert main(["config", json.dumps(several)]) == 0
    out = capsys.readouterr().out
    for place in (0, 1):
        where = f"{EXTRA_CONFIG}.connectors[{place}].{EXTRA_CONFIG}"
        assert f"valid connector configuration at {where}\n" in out
    assert "10737418240 (10 GiB)" in out
    assert "1048576 (1 MiB)" in out


@pytest.mark.parametrize("given", [GOOD, WHOLE])
def test_config_takes_the_extra_config_alone_or_the_whole(
    given: dict[str, object], capsys: Output
) -> None:
    assert main(["config", "--json", json.dumps(given)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] is True
    assert told["kind"] == "connector"
    assert told["config"]["block_size"] == 64
    assert {"path": "block_size", "value": 64, "from": "argument"} in told["settings"]
    assert {"path": "eviction_policy", "value": "lru", "from": "default"} in told["settings"]


def test_config_reads_stdin(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(GOOD).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["config", "-"]) == 0
    assert columns(capsys.readouterr().out)["block_size"] == ["64", "stdin"]


def test_config_of_a_store(capsys: Output) -> None:
    assert main(["config", "--kind", "store", json.dumps(STORE)]) == 0
    table = columns(capsys.readouterr().out)
    assert table["layout.layers"] == ["2", "argument"]
    assert table["layout.dtype"] == ['"bfloat16"', "default"]
    assert main(["config", json.dumps(STORE)]) == 2


@pytest.mark.parametrize("kind", ["connector", "store"])
def test_the_schema_needs_no_configuration(kind: str, capsys: Output) -> None:
    assert main(["config", "--schema", "--kind", kind]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "total over all workers" in schema["properties"]["cpu_bytes_to_use"]["description"]
    assert schema["additionalProperties"] is False
    assert ("layout" in schema["properties"]) == (kind == "store")
    assert schema["$defs"]["FsTierConfig"]["required"] == ["type", "root_dir"]


BAD_TEXTS = {
    "unknown key": ('{"cpu_bytes_to_use": 1, "block_sise": 16}', "block_sise = 16", "block_size"),
    "wrong type": ('{"cpu_bytes_to_use": "64"}', "cpu_bytes_to_use = '64'", "10737418240"),
    "both sizes": (
        '{"cpu_bytes_to_use": 1, "block_size": 16, "blocks_per_chunk": 2}',
        "blocks_per_chunk = 2",
        "leave out one of the two",
    ),
    "key twice": ('{"cpu_bytes_to_use": 1, "cpu_bytes_to_use": 2}', "cpu_bytes_to_use", "keep one"),
    "no json": ('{"cpu_bytes_to_use": 1', "line 1, column 23", "write one JSON object"),
    "a list": ("[1]", "must be an object", "write one JSON object"),
    "whole without keys": (
        '{"kv_connector": "TieredConnector"}',
        "kv_connector_extra_config.cpu_bytes_to_use = (absent)",
        '"cpu_bytes_to_use": 10737418240',
    ),
    "whole of another connector": (
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
        "kv_connector = 'NixlConnector': is not this engine",
        'write "TieredConnector"',
    ),
    "vLLM's own spec": (
        '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": '
        '{"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1}}',
        "kv_connector = 'OffloadingConnector': is not this engine",
        '"spec_name": "TieredOffloadingSpec"',
    ),
    "whole without a connector": (
        '{"kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1}}',
        "kv_connector = None: is not this engine",
        'write "TieredConnector"',
    ),
    "a child of a MultiConnector": (
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": '
        '[{"kv_connector": "NixlConnector"}, {"kv_connector": "TieredConnector"}]}}',
        "kv_connector_extra_config.connectors[1].kv_connector_extra_config.cpu_bytes_to_use",
        '"cpu_bytes_to_use": 10737418240',
    ),
    "whole with no object": (
        '{"kv_connector": "TieredConnector", "kv_connector_extra_config": null}',
        "kv_connector_extra_config = None",
        "write one JSON object",
    ),
}


@pytest.mark.parametrize(("text", "what", "remedy"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_an_invalid_configuration_is_one_sentence_and_exit_code_2(
    text: str, what: str, remedy: str, tmp_path: Path, capsys: Output
) -> None:
    path = tmp_path / "kv.json"
    path.write_text(text)
    for source in (text, str(path)):
        assert main(["config", source]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert err.startswith("tiering: ")
        assert what in err
        assert remedy in err


def test_an_invalid_configuration_as_json(capsys: Output) -> None:
    assert main(["config", "--json", '{"cpu_bytes_to_use": 0}']) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["valid"] is False
    assert told["error"]["path"] == "cpu_bytes_to_use"
    assert err == f"tiering: {told['error']['message']}\n"


def test_binary_garbage_is_told_apart(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(bytes(range(256)) * 8)
    assert main(["config", str(path)]) == 2
    assert "not text in UTF-8" in capsys.readouterr().err


def test_what_cannot_be_read_is_exit_code_1(tmp_path: Path, capsys: Output) -> None:
    large = tmp_path / "large"
    large.write_bytes(b" " * ((1 << 20) + 1))
    for path, why in (
        (tmp_path / "missing", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (large, "over 1048576 bytes"),
    ):
        assert main(["config", str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert str(path) in err
        assert why in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["config"],
        ["nothing"],
        ["stat"],
        ["config", "--x"],
        ["verify"],
        ["gc"],
        ["verify", "--max-mb-per-second", "-1", "/"],
        ["verify", "--quarantine", "--report-only", "/"],
        ["gc", "--orphaned-days", "nan", "/"],
    ],
)
def test_misuse_is_exit_code_2(arguments: list[str], capsys: Output) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: tiering" in capsys.readouterr().err


def test_help_has_the_exit_codes(capsys: Output) -> None:
    for arguments in (
        ["--help"],
        ["config", "--help"],
        ["stat", "--help"],
        ["verify", "--help"],
        ["gc", "--help"],
    ):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
        assert "exit codes:" in capsys.readouterr().out


def chunk_files(root: Path) -> list[Path]:
    return sorted(root.glob("*_r*/???/*/*.bin"))


async def store_and_damage(root: Path) -> None:
    """Two chunks by rank 0, which stay, and one by rank 1, which is found damaged."""
    keys = [chunk_key(bytes([at]) * 32) for at in range(3)]
    chunk = memoryview(mmap.mmap(-1, 4096))
    for rank, own in ((0, keys[:2]), (1, keys[2:])):
        tier = FsTier(root, NAMESPACE, 4096, n_read_threads=1, n_write_threads=1, rank=rank)
        await tier.open()
        await tier.write(own, [chunk] * len(own))
        if rank == 1:
            damaged = chunk_files(root)[-1]
            os.truncate(damaged, 100)
            await tier.read(own, [chunk])
        await tier.close()


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a probe finds depends on what else the disk does."""
    found = Direct(reads=True, writes=False)
    monkeypatch.setattr("tiering.maintenance.probe_io_path", lambda root: found)


@pytest.mark.usefixtures("probed")
def test_stat_shows_what_a_root_holds(tmp_path: Path, capsys: Output) -> None:
    asyncio.run(store_and_damage(tmp_path))
    first, second = chunk_files(tmp_path)
    for path, age in ((first, 7200), (second, 90)):
        os.utime(path, (time.time() - age,) * 2)
    assert main(["stat", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    size = f"{(first.stat().st_size + second.stat().st_size) / 1024:.4g} KiB"
    how = "I/O direct reads, buffered writes"
    assert out.startswith(f"{tmp_path}: 1 namespace, 2 chunks, {size}; {how}\n")
    titles = ["digest", "layout", "ranks", "chunks", "size", "oldest", "newest", "temporary"]
    assert columns(out)["model"] == [*titles, "quarantined"]
    digest = NAMESPACE.digest.hex()[:12]
    row = ["2", "2", size, "2.0 h", "1.5 min", "0", "1"]
    assert columns(out)["acme/tiny"] == [digest, "files", *row]


@pytest.mark.usefixtures("probed")
def test_stat_as_json(tmp_path: Path, capsys: Output) -> None:
    asyncio.run(store_and_damage(tmp_path))
    assert main(["stat", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    size = sum(path.stat().st_size for path in chunk_files(tmp_path))
    assert told["root"] == str(tmp_path)
    assert told["io_path"] == "direct reads, buffered writes"
    assert told["direct"] == {"reads": True, "writes": False}
    assert (told["chunks"], told["bytes"]) == (2, size)
    (found,) = told["namespaces"]
    assert found["directory"] == NAMESPACE.directory
    assert found["model"] == "acme/tiny"
    assert found["ranks"] == [0, 1]
    assert found["config"]["tokens_per_block"] == 16
    assert (found["chunks"], found["bytes"]) == (2, size)
    assert (found["temp_files"], found["quarantined"]) == (0, 1)
    assert found["layouts"] == ["files"]
    assert size <= told["disk_bytes"] == found["disk_bytes"]
    assert 0 < told["free_bytes"] < told["total_bytes"]
    assert 0 < found["oldest_mtime_seconds"] <= found["newest_mtime_seconds"] <= time.time()


def test_stat_says_what_moves_bytes_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output
) -> None:
    def without_uring(engine: str) -> ChunkIo:
        if engine == "uring":
            raise EngineUnavailable("uring: no io_uring here: Operation not permitted")
        return open_engine("portable")

    monkeypatch.setattr("tiering.maintenance.open_engine", without_uring)
    assert main(["stat", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "I/O engines: threads, portable; auto takes threads\n" in out
    assert "  not uring: uring: no io_uring here: Operation not permitted\n" in out
    assert main(["stat", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["io_engine"] == "threads"
    assert told["io_engines"]["uring"]["works"] is False
    assert told["io_engines"]["portable"] == {"works": True, "reason": ""}


def test_stat_says_who_keeps_the_manifest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output
) -> None:
    assert main(["stat", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"file system {mounts.kind_of(tmp_path)}: " in out
    assert "; one manifest for all engines\n" in out
    monkeypatch.setattr("tiering.tiers.disk.mounts.kind_of", lambda directory: "nfs4")
    assert main(["stat", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "file system nfs4: " in out
    assert "; each engine keeps its own\n" in out
    assert main(["stat", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["file_system"], told["manifest"]) == ("nfs4", "in memory")


async def store_in_segments(root: Path) -> None:
    async with segment_places.opened(root, slots=4) as tier:
        await stored(tier, segment_places.KEYS[:3])


def test_stat_shows_segments(tmp_path: Path, capsys: Output) -> None:
    asyncio.run(store_in_segments(tmp_path))
    assert main(["stat", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    (found,) = told["namespaces"]
    assert found["layouts"] == ["segments"]
    assert (found["ranks"], found["chunks"]) == ([0], 3)
    assert found["bytes"] == 3 * segment_places.SLOT_BYTES
    assert found["disk_bytes"] >= 4 * segment_places.SLOT_BYTES
    assert found["oldest_mtime_seconds"] == pytest.approx(1_700_000_000, abs=1)
    assert columns_of_stat(tmp_path, capsys)[1] == "segments"


def columns_of_stat(root: Path, capsys: Output) -> list[str]:
    assert main(["stat", str(root)]) == 0
    return columns(capsys.readouterr().out)["org/model"]


def test_stat_says_what_it_cannot_look_into(tmp_path: Path, capsys: Output) -> None:
    asyncio.run(store_in_segments(tmp_path))
    directory = segment_places.segments_of(tmp_path)
    (directory / "table").unlink()
    assert main(["stat", str(tmp_path)]) == 0
    assert f"not looked into: {directory}: No such file" in capsys.readouterr().out


def test_stat_of_an_empty_root_leaves_it_empty(tmp_path: Path, capsys: Output) -> None:
    assert main(["stat", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "0 namespaces, 0 chunks, 0 B; I/O " in out
    assert "no engine has opened a tier here yet" in out
    assert list(tmp_path.iterdir()) == []


def test_stat_of_a_root_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output
) -> None:
    def refuse(root: Path) -> str:
        raise OSError(errno.EROFS, "Read-only file system", str(root))

    monkeypatch.setattr("tiering.maintenance.probe_io_path", refuse)
    assert main(["stat", str(tmp_path)]) == 0
    assert "; cannot be written to (Read-only file system)\n" in capsys.readouterr().out
    assert main(["stat", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["io_path"] is None


def test_stat_survives_any_name(tmp_path: Path, capsys: Output) -> None:
    odd = os.fsdecode(b"\xff\x1b_0123456789ab")
    (tmp_path / odd).mkdir()
    for arguments in (["stat", str(tmp_path)], ["stat", "--json", str(tmp_path)]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "0123456789ab" in out


@pytest.mark.parametrize("name", ["stat", "verify", "gc"])
def test_no_root_is_one_sentence_and_exit_code_1(name: str, tmp_path: Path, capsys: Output) -> None:
    assert main([name, str(tmp_path / "missing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err == f"tiering: {tmp_path / 'missing'} does not exist; give the root_dir of an fs tier\n"
    )


@pytest.mark.slow
def test_a_real_process_says_no_traceback(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x00\xff\xfe" * 100)
    for arguments, code in (
        (("config", json.dumps(GOOD)), 0),
        (("config", str(garbage)), 2),
        (("config", '{"cpu_bytes_to_use": "1"}'), 2),
        (("stat", "/nothing"), 1),
        (("verify", "/nothing"), 1),
        (("gc", str(tmp_path)), 1),
        (("stat", str(garbage)), 2),
        (("config", os.fsdecode(b"/nothing/\xff")), 1),
        (("--version",), 0),
    ):
        done = command(*arguments)
        assert done.returncode == code, done
        assert b"Traceback" not in done.stderr
        assert bool(done.stderr) == (code != 0)


def test_a_reader_who_leaves_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # Buffered as stdout usually is, so that what fails is the flush at the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(writer, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "tiering", "config", json.dumps(GOOD)],
            env=buffered,
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b""


def test_any_terminal_can_print_any_directory(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    path.write_text(json.dumps({**GOOD, "secondary_tiers": [{"type": "fs", "root_dir": "/käse"}]}))
    done = command("config", str(path), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert rb"/k\xe4se" in done.stdout
