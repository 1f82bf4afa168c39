"""The user's `kv_connector_extra_config` as typed settings; every error names its key and the offending value."""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvlane.connector import p2p_keys

PREFIX = "kvlane."
SAVE_METHODS = ("auto", "process_vm", "mapped")
LAYOUTS = ("auto", "block", "layer")
SWITCH = ("on", "off")
TRANSPORTS = ("auto", "tcp", "cma", "cuda")
DAEMON = ("auto", "on", "off")
# These keys have no prefix: users know them from vLLM's P2P NCCL connector (p2p_keys.py). They count with
# `kvlane.direct` only.
PLAIN = ("send_type", "kv_buffer_size", "proxy_ip", "proxy_port", "http_port", "kv_port")


@dataclass(frozen=True)
class Settings:
    """Each field is the key `kvlane.<field>`, and `direct_<name>` is `kvlane.direct.<name>`; other keys without the
    prefix than those of PLAIN belong to others and are ignored."""

    address: str | None = None
    """The daemon's Unix socket: `unix:PATH` or a path; None takes KVLANE_ADDR, then the user's default socket."""
    daemon: str = "auto"
    """Whether the engine uses a daemon: one of DAEMON. `auto` uses one, except for an engine with `kvlane.direct`, no
    address here or in KVLANE_ADDR, and no default socket when it starts."""
    daemon_user: str | None = None
    """A user whose daemon is used beside one's own and root's, by name or number; None takes KVLANE_DAEMON_USER."""
    lookup_timeout_ms: float = 250.0
    """A lookup that takes longer is a miss."""
    lookup_wait_us: int = 300
    """How long one scheduling attempt waits for a lookup before the request is asked again in the next step."""
    wait_ms: float = 2000.0
    """How long a lookup waits for what a prefill engine said it would store, without anything of it coming."""
    save: bool = True
    """Whether computed blocks are saved."""
    load: bool = True
    """Whether saved blocks are loaded."""
    load_stall_ms: float = 4.0
    """How long a step of other requests may wait for a load on a GPU. With more, a loaded prompt's first token comes
    earlier, and the other requests' tokens later."""
    save_decode: bool = True
    """Whether blocks that were generated, not only those of the prompt, are saved."""
    max_pinned_share: float = 0.5
    """Share of the engine's blocks that unfinished saves may pin at most."""
    save_method: str = "auto"
    """How saves travel: one of SAVE_METHODS."""
    layout: str = "auto"
    """How vLLM is asked to lay out its KV cache, one of LAYOUTS: as it likes, a block's layers together, or apart."""
    direct: str = "off"
    """Whether prompts go from engine to engine directly, without the daemon: one of SWITCH. Without this key, the
    keys of vLLM's P2P NCCL connector switch it on."""
    direct_listen: str = "127.0.0.1:0"
    """HOST:PORT at which other engines reach this one for direct hand-offs, the host as a number; port 0 for any.
    Without this key, `kv_port` is the port."""
    direct_token: str = ""
    """The token that all engines of direct hand-offs share. Required if `direct.listen` is no loopback address."""
    direct_tls_certificate: str = ""
    """A file with this engine's certificate for direct hand-offs, PEM, which encrypts all of them: every engine has one
    then, signed by the same authority, and all bytes go through sockets."""
    direct_tls_key: str = ""
    """The file with its key."""
    direct_tls_authority: str = ""
    """The file with the authority's own certificate. It has signed those of all engines."""
    direct_peers: str = ""
    """Networks and addresses, with commas between, of engines that this one may connect to, beside this user's own on
    this host."""
    direct_transport: str = "auto"
    """How blocks come to this engine, one of TRANSPORTS: the best way, through sockets alone, by process_vm alone, or
    from GPU to GPU alone. For the last two the other engine has to be on this host."""
    direct_wait_ms: float = 60_000.0
    """How long a request waits for a direct hand-off in all."""
    send_type: str = "PUT_ASYNC"
    """With `kvlane.direct`, when a prompt is offered: `PUT_ASYNC`, `PUT` or `GET`. With `GET` all of it once it is
    computed, else layer by layer while it is computed."""
    kv_buffer_size: float | None = None
    """With `kvlane.direct`, bytes of each rank in which prompts may land at once; None takes a tenth of the engine's
    blocks, and more for one that is longer. With `GET` also those that may be pinned for other engines."""
    proxy_ip: str = ""
    """With `kvlane.direct` and `proxy_port`, the host of a proxy that gets pings: a number or a name."""
    proxy_port: int | None = None
    """The proxy's port for pings."""
    http_port: int | None = None
    """The port of this engine's API server for the pings; None takes the server's own `--port`."""
    kv_port: int | None = None
    """With `kvlane.direct`, the port of `kvlane.direct.listen` where that key is missing. vLLM's own field counts too
    if it is not its default, 14579."""
    namespace: str = ""
    """Engines share blocks only with engines of the same word here."""
    weights_version: str = ""
    """A name for the weights that the engine starts with, where they are not those of its files: see
    kvlane.connector.weights.name_weights."""

    @staticmethod
    def parse(extra: Mapping[str, object] | None, own: Mapping[str, object] | None = None) -> Settings:
        """`own`: vLLM's own fields of the names in p2p_keys.FIELDS, where it has them. Raises ValueError, in one
        sentence, for an unknown key, one without its prefix, a wrong type or value."""
        known = {key_name(field.name): field for field in fields(Settings) if field.name not in PLAIN}
        values: dict[str, Any] = {}
        p2p = p2p_keys.read(extra, own)
        if p2p.given and "kvlane.direct" not in (extra or {}):
            values["direct"] = "on"
        if values or (extra or {}).get("kvlane.direct") == "on":
            values |= p2p.values
            if "kv_port" in values:
                values["direct_listen"] = f"127.0.0.1:{values['kv_port']}"
        for key, value in (extra or {}).items():
            name = key.removeprefix(PREFIX)
            if not key.startswith(PREFIX) or name not in known:
                _refuse_if_ours(key, known)
                continue
            if name == "daemon_user" and isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            values[known[name].name] = _checked(key, known[name].default, value)
        settings = Settings(**values)
        settings._check_ranges()
        return settings

    def _check_ranges(self) -> None:
        if self.address is not None:
            refuse_tcp("kvlane.address", self.address)
        if not 1 <= self.lookup_timeout_ms <= 60_000:
            raise ValueError(f"kvlane.lookup_timeout_ms must be 1 to 60000, not {self.lookup_timeout_ms:g}")
        if not 0 <= self.wait_ms <= 30_000:
            raise ValueError(f"kvlane.wait_ms must be 0 to 30000, not {self.wait_ms:g}")
        if not 0 <= self.load_stall_ms <= 1_000:
            raise ValueError(f"kvlane.load_stall_ms must be 0 to 1000, not {self.load_stall_ms:g}")
        if not 0 <= self.lookup_wait_us <= 10_000:
            raise ValueError(f"kvlane.lookup_wait_us must be 0 to 10000, not {self.lookup_wait_us!r}")
        if not 0 < self.max_pinned_share <= 0.9:
            raise ValueError(
                f"kvlane.max_pinned_share must be above 0 and at most 0.9, not {self.max_pinned_share:g}"
            )
        self._check_direct()
        self._check_daemon()
        choices = {
            "save_method": SAVE_METHODS,
            "layout": LAYOUTS,
            "direct": SWITCH,
            "daemon": DAEMON,
            "direct_transport": TRANSPORTS,
        }
        for name, words in choices.items():
            value = getattr(self, name)
            if value not in words:
                raise ValueError(f"kvlane.{key_name(name)} must be one of {', '.join(words)}, not {value!r}")

    def _check_daemon(self) -> None:
        if self.daemon == "off" and self.address is not None:
            raise ValueError(
                f"kvlane.daemon is off, and kvlane.address names a daemon, {self.address!r}: leave one of them out"
            )
        if self.daemon == "off" and self.direct == "off":
            raise ValueError(
                "kvlane.daemon is off, and so is kvlane.direct: the connector would do nothing; leave it out of the "
                "engine's configuration"
            )

    def pings(self) -> bool:
        """Whether the engine registers with a proxy."""
        return bool(self.direct == "on" and self.proxy_ip and self.proxy_port)

    def needs_daemon(self) -> bool:
        """Whether the engine uses a daemon even if there is none when it starts."""
        if self.daemon != "auto":
            return self.daemon == "on"
        return self.direct == "off" or self.address is not None or bool(os.environ.get("KVLANE_ADDR"))

    def _check_direct(self) -> None:
        if not 0 <= self.direct_wait_ms <= 3_600_000:
            raise ValueError(f"kvlane.direct.wait_ms must be 0 to 3600000, not {self.direct_wait_ms:g}")
        host, _, port = self.direct_listen.rpartition(":")
        try:
            number = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            number = None
        if number is None or not port.isdecimal() or int(port) > 65535:
            raise ValueError(
                f"kvlane.direct.listen must be HOST:PORT with a number for the host, not {self.direct_listen!r}"
            )
        if not number.is_loopback and not self.direct_token:
            raise ValueError(
                f"kvlane.direct.listen is {self.direct_listen!r}, which other hosts reach: that needs a "
                "kvlane.direct.token, the same in all engines"
            )
        files = (self.direct_tls_certificate, self.direct_tls_key, self.direct_tls_authority)
        if any(files) and not all(files):
            raise ValueError(
                "kvlane.direct.tls_certificate, kvlane.direct.tls_key and kvlane.direct.tls_authority belong together: "
                "give all three or none"
            )
        if any(files) and self.direct_transport in ("cma", "cuda"):
            raise ValueError(
                f"kvlane.direct.transport is {self.direct_transport}, which copies without sockets: TLS cannot encrypt "
                "it"
            )
        for network in self.networks():
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError:
                raise ValueError(
                    f"kvlane.direct.peers must name networks and addresses, such as 10.0.0.0/8, not {network!r}"
                ) from None

    def tls_files(self) -> tuple[str, str, str] | None:
        """Certificate, key and authority; None without TLS."""
        files = (self.direct_tls_certificate, self.direct_tls_key, self.direct_tls_authority)
        return files if all(files) else None

    def networks(self) -> list[str]:
        """The networks in `direct_peers`."""
        return [each.strip() for each in self.direct_peers.split(",") if each.strip()]


def key_name(field: str) -> str:
    """A field's name in the key, behind `kvlane.`."""
    return field.replace("direct_", "direct.", 1)


def refuse_tcp(name: str, address: str) -> None:
    """Raises ValueError for an address that an engine cannot use: only a Unix socket carries the pool, and the proof
    who is at the other end. `fake:NAME` is the stand-in of tests."""
    is_url = "://" in address and not address.startswith("unix:")
    if not is_url and address != "unix:" and (address.startswith(("unix:", "fake:")) or "/" in address):
        return
    if is_url or re.fullmatch(r".+:[0-9]+", address):
        raise ValueError(
            f"{name} is {address!r}, a TCP address: engines use the daemon's Unix socket only, which its log names "
            "at its start; write unix:PATH, or leave it out for the default socket"
        )
    raise ValueError(f"{name} is {address!r}, which is no address: write unix:PATH, or leave it out")


# A key that was meant for kvlane may have another sign after its name, or none.
_OUR_NAME = re.compile(r"kv[-_]?lane([-_.:/ ]+|$)", re.IGNORECASE)


def _refuse_if_ours(key: str, known: Iterable[str]) -> None:
    """Raises ValueError for a key that was meant for kvlane, and says which. Others' keys are left alone."""
    names = list(known)
    found = _OUR_NAME.match(key)
    name = (key[found.end() :] if found else key).lower().replace("-", "_")
    if found and name in (*PLAIN, *p2p_keys.WITHOUT_EFFECT):
        raise ValueError(
            f"kv_connector_extra_config has the unknown key {key!r}: write {name!r}, as for vLLM's P2P NCCL connector"
        )
    # Without kvlane's name in it, only what can hardly be a key of somebody else.
    cutoff = 0.6 if found else 0.85 if len(name) > 5 else 1.0
    meant = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if not found and meant:
        raise ValueError(
            f"kv_connector_extra_config has the key {key!r}, and kvlane's keys begin with its name: "
            f"write {PREFIX + meant[0]!r}"
        )
    if meant:
        raise ValueError(
            f"kv_connector_extra_config has the unknown key {key!r}: did you mean {PREFIX + meant[0]!r}?"
        )
    if found:
        raise ValueError(
            f"kv_connector_extra_config has the unknown key {key!r}; kvlane knows "
            + ", ".join(PREFIX + each for each in names)
        )


def _checked(key: str, default: object, value: object) -> object:
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        wanted = "a whole number"
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool):
            # JSON may have a whole number that is too long for a float: it is out of every range as well.
            return float(value) if abs(value) < 1e300 else math.inf
        wanted = "a number"
    else:
        if isinstance(value, str) or (value is None and default is None):
            return value
        wanted = "a string"
    raise ValueError(f"{key} must be {wanted}, not {value!r}")
