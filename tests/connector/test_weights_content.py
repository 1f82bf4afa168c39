"""Weights are told apart by what is in them: on any host, by any path, at any time."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import safetensors, sparse_safetensors

from kvlane.connector import weights_content, weights_memo
from kvlane.connector.model_files import configuration_files, weight_files
from kvlane.connector.weights_content import FilesChanging, WeightsContent, read_content
from kvlane.connector.weights_memo import ENTRIES, WeightsMemo, memo_folder

LARGE = 1 << 20
SMALL = weights_content.WHOLE_BELOW - 1
SECOND = 1_000_000_000


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def tensors(seed: int = 0) -> dict[str, bytes]:
    return {"norm": noise(seed, 512), "bias": noise(seed + 1, SMALL), "up": noise(seed + 2, LARGE)}


def later(path: Path) -> Callable[[], int]:
    """A clock at which a file is old enough to be remembered."""
    return lambda: path.stat().st_ctime_ns + 3 * SECOND


def test_files_of_equal_bytes_are_equal_and_another_tensor_header_or_index_is_another_model(
    tmp_path: Path,
) -> None:
    base = tensors()
    found = {read_content([safetensors(tmp_path / name, base)]) for name in ("one", "two", "deeper/three")}
    assert len(found) == 1 and not next(iter(found)).weaker
    others = {
        "another small tensor": base | {"bias": noise(9, SMALL)},
        "another large tensor": base | {"up": noise(9, LARGE)},
        "another name": {"norm2": base["norm"], "bias": base["bias"], "up": base["up"]},
        "one more": base | {"down": b""},
        "one less": {"norm": base["norm"], "up": base["up"]},
    }
    found |= {read_content([safetensors(tmp_path / name, data)]) for name, data in others.items()}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    found.add(read_content([index, tmp_path / "one"]))
    found.add(read_content([tmp_path / "one", tmp_path / "two"]))
    assert len(found) == 1 + len(others) + 2


def test_every_byte_of_a_small_tensor_counts(tmp_path: Path) -> None:
    """A norm of some kilobytes is read whole: one changed byte at its end is another model."""
    one = tensors()
    two = one | {"bias": one["bias"][:-1] + bytes([one["bias"][-1] ^ 1])}
    contents = {read_content([safetensors(tmp_path / str(n), each)]) for n, each in enumerate((one, two))}
    assert len(contents) == 2


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 300_000) | st.integers(0, 1 << 28),
    name=st.text(max_size=20),
    begin=st.integers(0, 1 << 40),
)
def test_what_is_read_of_a_tensor_lies_inside_it_and_is_a_page_in_each_stretch(
    size: int, name: str, begin: int
) -> None:
    samples = weights_content._samples(name, begin, begin + size, weights_content.WHOLE_BELOW)
    if size < weights_content.WHOLE_BELOW:
        assert samples == [(begin, size)]
        return
    stretches = -(-size // weights_content.STRETCH)
    assert [(at - begin) // weights_content.STRETCH for at, _ in samples] == list(range(stretches))
    assert all(begin <= at and at + length <= begin + size for at, length in samples)
    assert all(length == weights_content.PAGE for _, length in samples[:-1])
    assert sum(length for _, length in samples) >= weights_content.PAGE


def test_16_gigabytes_are_known_from_a_few_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes 0.5 s possible for 8 files of 300 tensors: not how fast it reads, but how little."""
    read = counted_reads(monkeypatch)
    files = [
        sparse_safetensors(tmp_path / f"{n}.safetensors", {f"{n}.{t}": 57 << 20 for t in range(38)})
        for n in range(8)
    ]
    assert sum(each.stat().st_size for each in files) > 16 << 30
    assert not read_content(files).weaker
    assert sum(read) < 6 << 20
    assert len(read) < 1400


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), length=st.integers(0, 1 << 63))
def test_a_file_that_is_no_safetensors_file_is_read_by_pages(
    data: bytes, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    for content in (data, length.to_bytes(8, "little") + data):
        path.write_bytes(content)
        assert len(read_content([path]).digest) == 32


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"data_offsets": [0]}}',
        b'{"a": {"data_offsets": [0, 99]}}',
        b'{"a": {"data_offsets": [-1, 2]}}',
        b'{"a": {"data_offsets": ["0", "1"]}}',
        b'{"a": {"data_offsets": [0, 3]}, "b": {"data_offsets": [2, 4]}}',
        b"[" * 50_000,
    ],
)
def test_a_header_that_lies_makes_a_file_weaker_not_wrong(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    assert read_content([path]).weaker
    before = read_content([path])
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"Data")
    assert read_content([path]) != before


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads from now on."""
    read = []
    pread = os.pread

    def counting(file: int, size: int, at: int) -> bytes:
        found = pread(file, size, at)
        read.append(len(found))
        return found

    monkeypatch.setattr(os, "pread", counting)
    return read


def test_a_small_file_is_not_read_a_thousand_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may name a million tensors that all lie at the same place: an adapter of some megabytes kept the engine
    core reading hundreds of gigabytes."""
    header = json.dumps({str(n): {"data_offsets": [0, SMALL]} for n in range(2000)}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + noise(0, SMALL))
    read = counted_reads(monkeypatch)
    assert read_content([path]).weaker
    assert sum(read) < 3 * path.stat().st_size


def test_what_is_read_of_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file costs nothing to make."""
    monkeypatch.setattr(weights_content, "MAX_READ", 16 * SMALL)
    names = [str(n) for n in range(17)]
    assert not read_content([sparse_safetensors(tmp_path / "a", dict.fromkeys(names[1:], SMALL))]).weaker
    assert read_content([sparse_safetensors(tmp_path / "b", dict.fromkeys(names, SMALL))]).weaker
    empty = {"a": b"", "norm": b"norm", "b": b"", "c": b""}
    assert not read_content([safetensors(tmp_path / "c", empty)]).weaker, "empty tensors overlap nothing"


def test_other_formats_are_known_by_pages_of_both_ends_and_between(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    data = bytearray(noise(0, 5 << 20))
    path.write_bytes(data)
    contents = {read_content([path])}
    assert next(iter(contents)).weaker
    (page, _) = weights_content._pages(len(data))[1]
    for at in (0, len(data) - 1, page):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        contents.add(read_content([path]))
    assert len(contents) == 4


# Which files count


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names_of(folder: Path, load_format: str = "auto") -> list[str]:
    return [str(each.relative_to(folder)) for each in weight_files(folder, load_format)]


def test_only_what_vllm_loads_counts(tmp_path: Path) -> None:
    """A changed README, a copy in another format, or an optimizer's state makes no other model."""
    touch(tmp_path, "README.md", "tokenizer.json", "original/params.bin")
    assert names_of(tmp_path) == []
    touch(tmp_path, "b.pt")
    assert names_of(tmp_path) == ["b.pt"]
    touch(tmp_path, "pytorch_model.bin", "optimizer.bin", "training_args.bin")
    assert names_of(tmp_path) == ["pytorch_model.bin"]
    touch(tmp_path, "model-2.safetensors", "model-1.safetensors", "adapter.safetensors")
    assert names_of(tmp_path) == ["adapter.safetensors", "model-1.safetensors", "model-2.safetensors"]
    assert names_of(tmp_path, "pt") == ["b.pt"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert names_of(tmp_path) == [index.name, "model-1.safetensors", "model-2.safetensors"]
    touch(tmp_path, "consolidated.safetensors")
    assert names_of(tmp_path) == ["consolidated.safetensors"]
    assert names_of(tmp_path, "hf") == [index.name, "model-1.safetensors", "model-2.safetensors"]
    assert "original/params.bin" in names_of(tmp_path, "a plugin's format")


def test_a_quantization_described_beside_the_configuration_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    touch(tmp_path, "quantize_config.json", "modeling.py")

    def names(trust: bool) -> list[str]:
        return [each.name for each in configuration_files(tmp_path, trust)]

    assert names(False) == ["config.json", "quantize_config.json"]
    assert names(True) == ["config.json", "quantize_config.json", "modeling.py"]
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    assert names(False) == ["config.json"]


# The memo


class Reads:
    """Counts how often weights were really read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def counting(files: list[Path]) -> WeightsContent:
            self.count += 1
            return read_content(files)

        monkeypatch.setattr(weights_memo, "read_content", counting)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_an_engine_started_again_reads_nothing(tmp_path: Path, reads: Reads) -> None:
    model = safetensors(tmp_path / "model.safetensors", tensors())
    folder = tmp_path / "cache" / "kvlane" / "weights"
    content = WeightsMemo(folder, later(model)).content([model])
    assert WeightsMemo(folder, later(model)).content([model]) == content
    assert reads.count == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [each.stat().st_mode & 0o777 for each in folder.iterdir()] == [0o600]


def test_a_file_written_again_with_its_old_times_is_read_again(tmp_path: Path, reads: Reads) -> None:
    """The change time cannot be set back, so a file that another program gave its old times is seen."""
    model = safetensors(tmp_path / "model.safetensors", tensors())
    memo = WeightsMemo(tmp_path / "memo", lambda: model.stat().st_ctime_ns + 3 * SECOND)
    stat = model.stat()
    before = memo.content([model])
    safetensors(model, tensors(50))
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert memo.content([model]) != before
    assert reads.count == 2


def test_a_file_that_was_just_written_is_read_each_time(tmp_path: Path, reads: Reads) -> None:
    """Within its clock's step a file can be written twice with the same times."""
    model = safetensors(tmp_path / "model.safetensors", tensors())
    written = model.stat().st_ctime_ns
    now = [written]
    memo = WeightsMemo(tmp_path / "memo", lambda: now[0])
    for age in (-5 * SECOND, 0, SECOND, 2 * SECOND - 1):
        now[0] = written + age
        memo.content([model])
    assert reads.count == 4
    assert not (tmp_path / "memo").exists()
    for _ in range(2):
        now[0] = written + 2 * SECOND
        memo.content([model])
    assert reads.count == 5


def test_an_image_mounted_in_place_of_another_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two read-only images may agree in device, inodes, sizes and times: both were made with all times 0."""
    model = safetensors(tmp_path / "model.safetensors", tensors())
    monkeypatch.setattr(weights_memo, "signature_of", lambda files: ((1, 2, 3, 0, 0),))
    memo = WeightsMemo(tmp_path / "memo")
    before = memo.content([model])
    safetensors(model, tensors(50))
    assert memo.content([model]) != before


def test_files_that_do_not_keep_still_have_no_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = safetensors(tmp_path / "model.safetensors", tensors())

    def read_while_written(files: list[Path]) -> WeightsContent:
        safetensors(model, tensors(random.randrange(1000)) | {"more": bytes(random.randrange(1, 1000))})
        return read_content(files)

    monkeypatch.setattr(weights_memo, "read_content", read_while_written)
    with pytest.raises(FilesChanging):
        WeightsMemo(None).content([model])


def only_entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def wrong(folder: Path) -> None:
    """Makes the entry say something else than the truth, as well formed as the memo's own."""
    entry = only_entry(folder)
    digest = "0" * 32
    entry.write_text(
        json.dumps(
            {"digest": digest, "weaker": False, "check": weights_memo._check(entry.name, digest, False)}
        )
    )


def test_the_test_can_plant_a_wrong_entry(tmp_path: Path, reads: Reads) -> None:
    """Without this the next test would pass for any reason."""
    model = safetensors(tmp_path / "model.safetensors", tensors())
    folder = tmp_path / "memo"
    WeightsMemo(folder, later(model)).content([model])
    wrong(folder)
    assert WeightsMemo(folder, later(model)).content([model]).digest == "0" * 32


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: only_entry(folder).chmod(0o666),
        lambda folder: folder.chmod(0o770),
        lambda folder: folder.chmod(0o702),
        lambda folder: only_entry(folder).write_bytes(b""),
        lambda folder: only_entry(folder).write_text('{"digest": "' + "0" * 32 + '", "weaker": false}'),
        lambda folder: only_entry(folder).write_text("[1]"),
        lambda folder: only_entry(folder).write_bytes(b"\xff" * 10_000),
        lambda folder: only_entry(folder).rename(folder.parent / "entry"),
        lambda folder: (
            only_entry(folder).rename(folder.parent / "entry"),
            (folder / (folder.parent / "key").read_text()).symlink_to(folder.parent / "entry"),
        ),
        lambda folder: (folder.rename(folder.parent / "real"), folder.symlink_to(folder.parent / "real")),
    ],
)
def test_an_entry_that_is_damaged_or_may_be_others_is_ignored(
    harm: Callable[[Path], None], tmp_path: Path, reads: Reads
) -> None:
    model = safetensors(tmp_path / "model.safetensors", tensors())
    folder = tmp_path / "memo"
    content = WeightsMemo(folder, later(model)).content([model])
    (tmp_path / "key").write_text(only_entry(folder).name)
    wrong(folder)
    harm(folder)
    assert WeightsMemo(folder, later(model)).content([model]) == content
    assert reads.count == 2


def test_a_memo_that_cannot_be_written_changes_nothing(tmp_path: Path, reads: Reads) -> None:
    """Scheduler and workers must find the same, whether or not one of them could write its memo."""
    model = safetensors(tmp_path / "model.safetensors", tensors())
    (tmp_path / "a file").write_text("")
    contents = {
        WeightsMemo(folder, later(model)).content([model])
        for folder in (None, tmp_path / "a file" / "below", tmp_path / "memo")
    }
    assert len(contents) == 1 and reads.count == 3


def test_the_number_of_entries_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "memo"
    model = tmp_path / "model.safetensors"
    for seed in range(ENTRIES + 5):
        safetensors(model, {"a": noise(seed, 64)})
        WeightsMemo(folder, later(model)).content([model])
    assert len(list(folder.iterdir())) == ENTRIES


def test_many_processes_may_write_the_same_entry(tmp_path: Path) -> None:
    """The workers of a tensor-parallel engine all start at once."""
    model = safetensors(tmp_path / "model.safetensors", tensors())
    folder = tmp_path / "memo"
    found: list[WeightsContent] = []

    def start() -> None:
        for _ in range(20):
            found.append(WeightsMemo(folder, later(model)).content([model]))
            for entry in list(folder.iterdir()):
                entry.unlink(missing_ok=True)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 80 and len(set(found)) == 1


def test_tests_leave_the_users_cache_folder_alone() -> None:
    """Each run left entries of its models there, which pushed the user's own out."""
    folder = memo_folder()
    assert folder is not None
    assert not folder.is_relative_to(Path.home() / ".cache")


def test_the_memo_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert memo_folder() == tmp_path / "kvlane" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert memo_folder() == tmp_path / "home" / ".cache" / "kvlane" / "weights"
