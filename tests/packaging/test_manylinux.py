"""The wheel of `make wheel`, which users get."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

from installed import only


def test_its_name_says_where_it_runs(wheel: Path) -> None:
    assert re.fullmatch(r"kvlane-[\d.]+-cp310-abi3-manylinux_2_28_x86_64\.whl", wheel.name)


def test_the_gpus_that_tests_pretend_to_have_are_not_in_it(programs: Path, wheel: Path) -> None:
    """They were: a variable left over from a test had a user's daemon serve GPUs made of shared memory."""
    command, environment = [programs / "kvlane", "doctor"], only(programs) | {"KVLANE_GPU_DRIVER": "fake"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert 'KVLANE_GPU_DRIVER is "fake", but must be cuda or off' in told.stdout
    with zipfile.ZipFile(wheel) as packed:
        having = [name for name in packed.namelist() if b"of a fake device" in packed.read(name)]
    assert having == []
