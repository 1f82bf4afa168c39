"""Throw-away certificates, for benchmarks and tests of TLS on one machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kvlane.fabric import Tls

_CONFIGURATION = """
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign
[both_sides]
basicConstraints = CA:FALSE
extendedKeyUsage = serverAuth,clientAuth
"""
_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def make(folder: Path) -> Tls:
    """Makes an authority and one certificate for both sides, as files in `folder`, with the `openssl` command. OSError
    with a sentence if there is no `openssl`, or it fails."""
    if shutil.which("openssl") is None:
        raise FileNotFoundError("there is no `openssl` command, which makes certificates")
    (folder / "openssl.cnf").write_text(_CONFIGURATION)
    for command in (
        f"req -x509 -config openssl.cnf -extensions authority {_KEY} -subj /CN=throw-away-authority -days 2 "
        "-keyout authority.key -out authority.pem",
        f"req -new -config openssl.cnf {_KEY} -subj /CN=throw-away -keyout key.pem -out request.pem",
        "x509 -req -in request.pem -CA authority.pem -CAkey authority.key -set_serial 1 -days 2 "
        "-extfile openssl.cnf -extensions both_sides -out certificate.pem",
    ):
        done = subprocess.run(["openssl", *command.split()], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"openssl {command}: {done.stderr.strip()}")
    return Tls(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")
