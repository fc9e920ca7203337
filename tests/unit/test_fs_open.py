"""Opening an fs tier: which mistakes are told how, config.json, and left-over temp files."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import orjson
import pytest

from fs_places import KEYS, NAMESPACE, children, file_of, files, make_tier, opened
from tiering.errors import ConfigError, TierError
from tiering.testing.examples import blank, stored
from tiering.tiers.base import Read
from tiering.tiers.disk import diskio, temps
from tiering.tiers.upkeep.survey import survey
from tiering_kernels.portable import PortableIo


async def refusal(root: Path) -> ConfigError:
    """Why a tier at `root` cannot be opened; no thread is left behind."""
    tier = make_tier(root)
    with pytest.raises(ConfigError) as caught:
        await tier.open()
    assert not [t for t in threading.enumerate() if t.name.startswith(tier.name)]
    await tier.close()
    assert caught.value.path == "secondary_tiers[].root_dir"
    return caught.value


async def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_bytes(b"mine")
    error = await refusal(root)
    assert error.value == str(root)
    assert "Not a directory" in error.reason
    assert error.remedy == "name a directory"
    assert root.read_bytes() == b"mine"


async def test_a_root_whose_parent_is_missing(tmp_path: Path) -> None:
    error = await refusal(tmp_path / "no" / "kv")
    assert "No such file or directory" in error.reason
    assert "create the parent directory" in error.remedy
    assert children(tmp_path) == []


@pytest.mark.slow
def test_a_root_that_may_not_be_written_to(tmp_path: Path) -> None:
    """In a process of its own, since only there can root put its rights down: what it owns it may
    enter all the same, as another user might not enter the directories above."""
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro").chmod(0o555)
    script = textwrap.dedent(
        """
        import asyncio, ctypes, struct, sys
        sys.path.insert(0, sys.argv[1])
        from fs_places import Path, make_tier
        from tiering.errors import ConfigError

        async def opened_once(root):
            tier = make_tier(root)
            await tier.open()
            await tier.close()

        NO_CAPABILITIES = struct.pack("Ii", 0x20080522, 0), bytes(24)
        if ctypes.CDLL(None, use_errno=True).capset(*NO_CAPABILITIES) != 0:
            raise OSError(ctypes.get_errno(), "capset")
        try:
            asyncio.run(opened_once(Path(sys.argv[2]) / "ro"))
        except ConfigError as error:
            print(error.reason, "|", error.remedy)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Permission denied" in done.stdout, done.stderr
    assert f"{NAMESPACE.directory} | give this user the right to write there" in done.stdout


async def test_a_missing_root_is_made_for_its_owner(tmp_path: Path) -> None:
    async with opened(tmp_path / "kv"):
        pass
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


async def test_a_relative_root_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tier = make_tier(Path("kv"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await tier.open()
    await tier.close()
    assert (tmp_path / "kv" / NAMESPACE.directory / "config.json").exists()


async def test_the_config_is_written_once(tmp_path: Path) -> None:
    config = tmp_path / NAMESPACE.directory / "config.json"
    async with opened(tmp_path):
        first = config.stat()
    async with opened(tmp_path), opened(tmp_path, rank=1):
        again = config.stat()
        assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert [path for path in children(config.parent) if path.is_file()] == [config]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (orjson.dumps({**NAMESPACE.describe(), "revision": "x"}), "(revision)"),
        (orjson.dumps({**NAMESPACE.describe(), "extra": 1}), "(extra)"),
    ],
)
async def test_a_config_that_says_something_else(tmp_path: Path, content: bytes, says: str) -> None:
    config = tmp_path / NAMESPACE.directory / "config.json"
    config.parent.mkdir()
    config.write_bytes(content)
    error = await refusal(tmp_path)
    assert says in error.reason
    assert str(config.parent) in error.remedy
    assert config.read_bytes() == content


async def test_many_who_open_at_once_agree(tmp_path: Path) -> None:
    tiers = [make_tier(tmp_path / "kv", rank=rank) for rank in range(8)]
    await asyncio.gather(*(tier.open() for tier in tiers))
    await asyncio.gather(*(tier.close() for tier in tiers))
    config = tmp_path / "kv" / NAMESPACE.directory / "config.json"
    assert orjson.loads(config.read_bytes()) == NAMESPACE.describe()
    assert files(tmp_path, "*.tmp") == []


async def test_a_full_disk_does_not_keep_a_tier_from_serving_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS[:2])

    def full(*args: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwritev", full)
    async with opened(tmp_path, io=PortableIo()) as tier:
        assert await tier.read(KEYS[:2], blank(2)) == [Read.HIT] * 2


async def test_an_error_that_the_user_did_not_make_is_the_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> str:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(diskio, "probe", broken)
    with pytest.raises(TierError, match=r"cannot be opened: \[Errno 5\]"):
        await make_tier(tmp_path).open()


# Left-over temp files


def staging(root: Path) -> Path:
    directory = root / NAMESPACE.directory / "tmp_r0"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def gone_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


async def test_only_the_temp_files_of_the_dead_are_swept(tmp_path: Path) -> None:
    mine = temps.temp_name()
    space, pid, start, _ = mine.split("-")
    assert int(pid) == os.getpid()
    dead = [f"{space}-{gone_process()}-1-0.tmp", f"{space}-{pid}-{int(start) + 1}-0.tmp"]
    foreign_old, foreign_new = f"{'0' * 12}-1-1-0.tmp", f"{'0' * 12}-1-1-1.tmp"
    kept = [mine, foreign_new, "notes.tmp", f"{space}-notes.tmp"]
    for name in [*dead, foreign_old, *kept]:
        (staging(tmp_path) / name).touch()
    yesterday = (staging(tmp_path) / mine).stat().st_mtime - 24 * 3600 - 60
    for name in [mine, foreign_old, "notes.tmp"]:
        os.utime(staging(tmp_path) / name, (yesterday, yesterday))
    config_dir = tmp_path / NAMESPACE.directory
    (config_dir / dead[0]).touch()
    async with opened(tmp_path):
        assert {path.name for path in children(staging(tmp_path))} == set(kept)
        assert [path.name for path in files(config_dir, "config*")] == ["config.json"]
        assert not (config_dir / dead[0]).exists()


def test_temp_names_never_repeat() -> None:
    names = {temps.temp_name() for _ in range(1000)}
    assert len(names) == 1000


# Processes

WRITER = textwrap.dedent(
    """
    import asyncio, os, sys, time
    sys.path.insert(0, sys.argv[1])
    from fs_places import Path, key_number, opened
    from tiering_kernels.portable import PortableIo
    from tiering.testing.examples import payload_of, views

    root, stuck = Path(sys.argv[2]), sys.argv[3] == "stuck"

    async def write():
        async with opened(root, io=PortableIo()) as tier:
            if stuck:
                pwritev = os.pwritev
                def half(descriptor, parts, at):
                    pwritev(descriptor, parts[:1], at)
                    os.write(1, b"stuck\\n")  # whole, also when two threads say it
                    time.sleep(600)
                os.pwritev = half
            print("open", flush=True)
            for start in range(0, 400, 20):
                keys = [key_number(i) for i in range(start, start + 20)]
                outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
                print(*[getattr(each, "name", each) for each in outcomes], flush=True)

    asyncio.run(write())
    """
)


def start_writer(root: Path, how: str = "free") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(root), how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


async def assert_each_chunk_is_whole(root: Path) -> None:
    async with opened(root) as tier:
        keys = [key async for batch in tier.scan() for key in batch]
        assert len(keys) == len(files(root, "*_g0/*.bin"))
        assert await tier.read(keys, blank(len(keys))) == [Read.HIT] * len(keys)
    (found,) = survey(root)
    assert (found.temp_files, found.quarantined) == (0, 0)


async def test_a_writer_killed_in_the_middle_leaves_nothing_but_a_temp_file_to_sweep(
    tmp_path: Path,
) -> None:
    writer = start_writer(tmp_path, "stuck")
    try:
        assert writer.stdout is not None
        assert [writer.stdout.readline().strip() for _ in range(2)] == ["open", "stuck"]
        async with opened(tmp_path):
            assert files(tmp_path, "*.tmp") != [], "a live writer's file was swept"
        writer.kill()
        writer.wait()
        assert files(tmp_path, "*.tmp") != []
        assert files(tmp_path, "*_g0/*.bin") == []
        await assert_each_chunk_is_whole(tmp_path)
    finally:
        writer.kill()
        writer.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 2, 5])
async def test_a_writer_killed_anywhere_leaves_whole_chunks(tmp_path: Path, lines: int) -> None:
    writer = start_writer(tmp_path)
    try:
        assert writer.stdout is not None
        for _ in range(lines):
            assert writer.stdout.readline()
    finally:
        writer.kill()
        writer.communicate()
    assert len(files(tmp_path, "*_g0/*.bin")) >= 20 * (lines - 1)
    await assert_each_chunk_is_whole(tmp_path)


@pytest.mark.slow
async def test_two_processes_that_write_the_same_keys_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    writers = [start_writer(tmp_path) for _ in range(2)]
    outputs = [writer.communicate()[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    for output in outputs:
        assert len(output) == 401
        assert set(output) <= {"open", "STORED", "ALREADY_THERE"}
    assert len(files(tmp_path, "*_g0/*.bin")) == 400
    await assert_each_chunk_is_whole(tmp_path)
    assert file_of(tmp_path, KEYS[0]).exists()
