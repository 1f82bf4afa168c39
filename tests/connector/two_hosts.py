"""Two engines in network namespaces of their own with one wire between them, as on two hosts; prints one JSON line.

    unshare --user --map-root-user --net python two_hosts.py --model MODEL --folder FOLDER [--tls]

P computes prompts in a namespace of its own, D continues them in the one that this script was started in. Both run in
one kernel, so only the setting keeps them from reading each other's memory. Each has a runtime folder of its own, so
neither finds the other's secret there: they need a token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "daemon"))

from direct_pair import answer, both_params
from engine import InProcessEngine, prompt
from prefill_engine import PrefillEngine

P, D = "10.77.0.1", "10.77.0.2"
TOKENS = 300
ANSWER = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tls", action="store_true", help="with the certificates in the folder")
    print("RESULT " + json.dumps(run(parser.parse_args())), flush=True)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    extra = {"kvlane.direct": "on", "kvlane.direct.transport": "tcp"}
    if arguments.tls:
        parts = {"certificate": "certificate", "key": "key", "authority": "authority"}
        extra |= {
            f"kvlane.direct.tls_{name}": f"{arguments.folder}/{file}.pem" for name, file in parts.items()
        }
    with far_namespace() as network:
        host(arguments.folder / "p")
        listen = {"kvlane.direct.listen": f"{P}:0", "kvlane.direct.token": "both"}
        p = PrefillEngine(arguments.model, "unix:/nobody", extra | listen, network=network)
        try:
            host(arguments.folder / "d")
            return {
                token: handed_over(arguments.model, p, extra | {"kvlane.direct.token": token}, number)
                for number, token in enumerate(("both", "another"))
            }
        finally:
            p.close()


def host(folder: Path) -> None:
    """What is started from here on has this runtime folder."""
    folder.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(folder)


def handed_over(model: Path, p: PrefillEngine, extra: dict[str, str], number: int) -> dict[str, Any]:
    """A prompt that P computes and D answers, with these settings of D."""
    listen = {"kvlane.direct.listen": f"{D}:0", "kvlane.direct.peers": f"{P}/32"}
    d = InProcessEngine(model, "unix:/nobody", extra=extra | listen)
    try:
        asked = prompt(number, TOKENS)
        alone = p.ask("generate", asked, ANSWER)
        for_p, for_d = both_params(p)
        name = d.add(asked, ANSWER, for_d)
        p.ask("prefill", asked, for_p)
        p.ask("finish")
        tokens, cached = answer(d, name)
        counted = {
            key: d.counted[f"direct_{key}"] for key in ("landed", "tcp_bytes", "cma_bytes", "fallbacks")
        }
        return {"is_as_alone": tokens == alone, "cached": cached, **counted}
    finally:
        d.close()


@contextmanager
def far_namespace() -> Iterator[Path]:
    """A network namespace with P's end of a wire; D's end is here."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo it is there; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "it is there\n"
        far = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(holder.pid))
        for where, wire, address in (([], "near", D), (far, "far", P)):
            ip("address", "add", f"{address}/30", "dev", wire, where=where)
            ip("link", "set", wire, "up", where=where)
            ip("link", "set", "lo", "up", where=where)
        yield Path(f"/proc/{holder.pid}/ns/net")
        holder.stdin.close()


def ip(*arguments: str, where: list[str] | None = None) -> None:
    subprocess.run([*(where or []), "ip", *arguments], check=True)


if __name__ == "__main__":
    main()
