"""Lists at the end of a run, beside skipped tests, those that could not be run on this machine."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

# scripts/stages.py reads it.
TIMES = Path(__file__).resolve().parent.parent / ".cache/times"


def tell(name: str, why: str) -> None:
    """Prints the reason at once, and records it for the end of a run of several stages."""
    print(f"not tested: {name}: {why}")
    suite = ElementTree.Element("testsuite")
    case = ElementTree.SubElement(suite, "testcase", classname="checks", name=name, time="0")
    ElementTree.SubElement(case, "skipped", message=why)
    TIMES.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(TIMES / f"{name.replace(' ', '-')}.xml")
