"""Sizes as flags of benchmarks take them: the table is that of crates/cli/src/size.rs."""

from __future__ import annotations

import argparse

import pytest

from kvlane.bench import fabric, ssd
from kvlane.bench.__main__ import main
from kvlane.bench.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4gb", 4_000_000_000),
        ("4GB", 4_000_000_000),
        ("4GiB", 4 << 30),
        ("4Gi", 4 << 30),
        ("4g", 4 << 30),
        ("4G", 4 << 30),
        ("64k", 64 << 10),
        ("512Mi", 512 << 20),
        ("1.5 mib", 3 << 19),
        (" 1.5m ", 3 << 19),
        ("2kb", 2000),
        ("1tb", 10**12),
        ("1T", 1 << 40),
        ("7b", 7),
        ("7 B", 7),
        ("4096", 4096),
    ],
)
def test_units_are_decimal_or_binary_as_written(text: str, wanted: int) -> None:
    assert parse_size(text) == wanted


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("4xb", "'xb'"),
        ("4 gigs", "'gigs'"),
        ("1e400", "'e400'"),
        ("gb", "for example"),
        ("", "for example"),
        (".", "for example"),
        ("1.2.3", "for example"),
        ("-1gb", "'-1gb'"),
        ("0", "above 0"),
        ("0.0001k", "above 0"),
    ],
)
def test_a_mistake_is_named_with_its_value(text: str, part: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse_size(text)
    assert part in str(error.value) and repr(text) in str(error.value)


def test_benchmarks_take_the_sizes_that_the_daemon_takes() -> None:
    """`kvlane bench fabric --size 1mib` was "not a number above 0", `kvlane bench ssd --capacity 2gb` "no size"."""
    parser = argparse.ArgumentParser()
    fabric.add_arguments(parser)
    given = parser.parse_args(["--size", "1mib,64k", "--page-bytes", "64KiB"])
    assert (given.sizes, given.page_bytes) == ([1 << 20, 64 << 10], 64 << 10)
    parser = argparse.ArgumentParser()
    ssd.add_arguments(parser)
    given = parser.parse_args(["x", "--capacity=2gb", "--blocks=2MiB,256Ki", "--phase-bytes=1Gi"])
    assert (given.capacity, given.phase_bytes) == (2_000_000_000, 1 << 30)
    assert given.blocks == [2 << 20, 256 << 10]


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "many", ""])
def test_a_count_that_is_none_is_refused_as_typed(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvlane bench lookup --blocks 0` and `kvlane bench share --engines 0` ended with a traceback."""
    with pytest.raises(SystemExit) as refused:
        main(["lookup", f"--blocks={text}"])
    assert refused.value.code == 2
    assert f"argument --blocks: {text!r} is no whole number above 0" in capsys.readouterr().err
