"""Two real engines in network namespaces of their own, as on two hosts: a prefill engine, and here the decode engine.

    unshare --user --map-root-user --net -- python two_hosts.py MODEL FOLDER

A wire joins the namespaces, and all KV blocks go through it, by TLS and then by TCP. A decode engine with another token
gets none, and neither does one whose wire is cut. The last line of stdout has the outcome of each prompt, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "daemon")]

from direct_pair import DIRECT, answer  # noqa: E402
from engine import InProcessEngine, prompt  # noqa: E402
from prefill_engine import PrefillEngine  # noqa: E402

from kvlane.bench import certificates  # noqa: E402

NEAR, FAR = "10.79.0.1", "10.79.0.2"
TOKENS = 470


def ip(arguments: str, inside: int | None = None) -> None:
    """`ip` with these arguments, here or in the network namespace of this process."""
    there = ["nsenter", "--target", str(inside), "--net", "--"] if inside is not None else []
    subprocess.run([*there, "ip", *arguments.split()], check=True)


def lay_wire(pid: int) -> None:
    """From this namespace to that of the prefill engine's process."""
    ip(f"link add near type veth peer name far netns {pid}")
    for name, address, inside in (("near", NEAR, None), ("far", FAR, pid)):
        ip(f"address add {address}/24 dev {name}", inside)
        ip(f"link set {name} up", inside)
        ip("link set lo up", inside)


def settings(address: str, token: str, tls: dict[str, str]) -> dict[str, str]:
    return {
        **DIRECT,
        "kvlane.direct.listen": f"{address}:0",
        "kvlane.direct.peers": "10.79.0.0/24",
        "kvlane.direct.token": token,
        "kvlane.direct.transport": "tcp",
        **tls,
    }


def tls_settings(folder: Path) -> dict[str, str]:
    """Certificates of one authority for both engines."""
    made = certificates.make(folder)
    return {
        "kvlane.direct.tls_certificate": str(made.certificate),
        "kvlane.direct.tls_key": str(made.key),
        "kvlane.direct.tls_authority": str(made.authority),
    }


def hand_over(p: PrefillEngine, d: InProcessEngine, seed: int, cut: bool = False) -> dict[str, Any]:
    """A prompt that P computes and D goes on with, and the counters of D."""
    truth = p.ask("generate", prompt(seed, TOKENS), 24)
    p.ask("prefill", prompt(seed, TOKENS), {"do_remote_decode": True})
    params = p.ask("finish")
    if cut:
        ip("link set near down")
    got, cached = answer(d, d.add(prompt(seed, TOKENS), 24, params))
    return {"right": got == truth, "cached": cached, "counted": dict(d.counted), "errors": d.errors()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="for certificates, and for the socket of a missing daemon")
    arguments = parser.parse_args()
    nobody = f"unix:{arguments.folder}/kvlane.sock"
    found: dict[str, Any] = {}
    for way, tls in (("tls", tls_settings(arguments.folder)), ("tcp", {})):
        p = PrefillEngine(arguments.model, nobody, settings(FAR, "ours", tls), lay_wire=lay_wire)
        try:
            found[way] = {"address": p.address}
            # The controls are the same with TLS: crates/fabric tests them there.
            for name, token in (("stranger", "theirs"), ("friend", "ours"))[way == "tls" :]:
                d = InProcessEngine(arguments.model, nobody, extra=settings(NEAR, token, tls))
                found[way][name] = hand_over(p, d, seed=1)
                if way == "tcp" and name == "friend":
                    found[way]["cut"] = hand_over(p, d, seed=2, cut=True)
                d.close()
        finally:
            # With the engine's process its namespace goes, and the wire with it, at some time.
            ip("link delete near")
            p.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
    # vLLM may leave threads behind.
    sys.stdout.flush()
    os._exit(0)
