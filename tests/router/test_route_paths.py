"""Which requests reach engines: inference by its path, under the router's own name, with a private key file."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from processes import KVLANE, PATIENCE
from routed import CHAT, COMPLETIONS, LONG, Router, ask, routed, wanted

from kvlane.testing.fake_engine import FakeEngine

TRANSFER = {"remote_block_ids": [1, 2], "of": "the prefill engine"}


class Recorder(ThreadingHTTPServer):
    """A server with one model that records all requests except probes. It hands over if asked to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.seen: list[tuple[str, str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.seen]


class _Answers(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer: dict[str, Any] = {"asked": f"{self.command} {self.path}"}
        if self.path == "/v1/models":
            answer = {"object": "list", "data": [{"id": "fake"}]}
        elif self.path != "/metrics":
            self.server.seen.append((self.command, self.path, body))
        if b'"do_remote_decode": true' in body:
            answer["kv_transfer_params"] = TRANSFER
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.command == "OPTIONS":
            self.send_header("Access-Control-Allow-Origin", "*")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_OPTIONS = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def recorders(roles: str, *flags: str) -> Iterator[tuple[Router, list[Recorder]]]:
    servers = [Recorder() for _ in roles]
    names = {"w": "--worker", "p": "--prefill", "d": "--decode"}
    words = [word for role, server in zip(roles, servers, strict=True) for word in (names[role], server.url)]
    try:
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        with Router(*words, *flags, nodes=len(servers)) as router:
            yield router, servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def asked(address: str, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


ADMIN_PATHS = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/something_new",
    "/sleep",
    "/wake_up",
    "/update_weights",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/abort_requests",
    "/inference/v1/generate",
]


def test_a_client_does_not_change_an_engine_for_all_others() -> None:
    """Any client of the router's port could unload an adapter that others were using."""
    with recorders("w") as (router, (engine,)):
        for path in ADMIN_PATHS:
            status, answer, _ = ask(router.address, path, {"model": "fake", "lora_name": "a"})
            assert status == 403, (path, answer)
            assert "--allow-admin-paths" in answer["error"]["message"]
            assert path in answer["error"]["message"]
        assert engine.seen == []


def test_an_operator_may_let_clients_do_that() -> None:
    with recorders("w", "--allow-admin-paths") as (router, (engine,)):
        for path in ADMIN_PATHS:
            status, answer, _ = ask(router.address, path, {"model": "fake"})
            assert (status, answer["asked"]) == (200, f"POST {path}")
        for path in ("/v1/%6coad_lora_adapter", "/v1//load_lora_adapter", "/x/../sleep"):
            assert ask(router.address, path, {"model": "fake"})[0] == 404
        assert len(engine.seen) == len(ADMIN_PATHS)


def test_a_post_without_a_body_passes_where_an_operator_allows_it() -> None:
    """`curl -X POST .../sleep` was refused: an empty body is no JSON."""
    with routed([], flags=("--allow-admin-paths",)) as (router, _):
        assert ask(router.address, "/reset_prefix_cache", b"")[0] == 200


def test_the_file_may_say_so_too(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("allow-admin-paths = true\nquiet-decisions = false\n")
    with recorders("w", "--config", str(file)) as (router, (engine,)):
        assert ask(router.address, "/sleep", {})[0] == 200
        assert [path for _, path, _ in engine.seen] == ["/sleep"]


INFERENCE = [
    COMPLETIONS,
    CHAT,
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
]


def test_what_changes_nothing_passes_on_to_an_engine_that_has_the_model() -> None:
    with recorders("w") as (router, (engine,)):
        for path in INFERENCE:
            status, answer, _ = ask(router.address, path, {"model": "fake", "prompt": "p"})
            assert (status, answer.get("asked")) == (200, f"POST {path}"), answer
            assert ask(router.address, path, {"model": "none", "prompt": "p"})[0] == 404, path
        assert ask(router.address, "/version")[1]["asked"] == "GET /version"
        assert [path for _, path, _ in engine.seen] == [*INFERENCE, "/version"]
        assert ask(router.address, "/version", {})[0] == 405


def test_the_paths_that_pass_are_those_of_vllms_server_and_the_page_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs/router-reference.md").read_text()
    source = (Path(__file__).parents[2] / "crates/router/src/proxy/paths.rs").read_text()
    code = source.split("#[cfg(test)]")[0]
    listed = set(re.findall(r'"(/[a-z0-9_/]+)"', code)) - {"/health"}
    assert len(listed) > 25
    missing = {path for path in listed if f"`{path}`" not in page}
    assert not missing, missing


def test_a_page_of_another_origin_hears_from_an_engine_what_it_may_do(tmp_path: Path) -> None:
    """A browser asks with OPTIONS before it sends a key."""
    preflight = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(0o600)
    with recorders("w", "--api-key-file", str(keys)) as (router, (engine,)):
        assert asked(router.address, "OPTIONS", CHAT, preflight)[0] == 200
        assert engine.seen == [("OPTIONS", CHAT, b"")]
        assert asked(router.address, "OPTIONS", "/sleep", preflight)[0] == 401
        assert asked(router.address, "OPTIONS", CHAT, {"Origin": "https://chat.example"})[0] == 401
        assert asked(router.address, "GET", "/version", {})[0] == 401
        assert len(engine.seen) == 1


def test_text_that_was_only_tokenized_is_in_no_cache() -> None:
    with routed([], []) as (router, (one, other)):
        for _ in range(4):
            assert ask(router.address, "/tokenize", wanted(LONG))[0] == 200
        assert ask(router.address, COMPLETIONS, wanted(LONG, max_tokens=1))[0] == 200
        _, page, _ = ask(router.admin, "/decisions?limit=1")
        assert page["decisions"][0]["cached_tokens"] == 0
        assert len(one.log()) + len(other.log()) == 1


RESPONSE = {"model": "fake", "instructions": LONG, "input": [{"role": "user", "content": "hello"}]}
MESSAGE = {
    "model": "fake",
    "system": LONG,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 9,
}


@pytest.mark.parametrize(
    ("path", "body", "one_token"),
    [
        (
            "/v1/responses",
            {**RESPONSE, "max_output_tokens": 9, "stream": True},
            {"max_output_tokens": 1, "store": False},
        ),
        ("/v1/messages", {**MESSAGE, "stream": True}, {"max_tokens": 1}),
    ],
)
def test_what_agents_speak_is_split_between_a_prefill_and_a_decode_engine(
    path: str, body: dict[str, Any], one_token: dict[str, Any]
) -> None:
    """The router split only chats and completions, so decode engines computed the long instructions of agents."""
    with recorders("pd") as (router, (prefill, decode)):
        assert ask(router.address, path, body)[0] == 200
        (first,), (second,) = prefill.bodies(), decode.bodies()
        assert first.pop("kv_transfer_params")["do_remote_decode"] is True
        ids = [leg.pop("request_id", None) for leg in (first, second)]
        if path == "/v1/responses":
            assert re.fullmatch(r"resp_kvlane-.*-p0", ids[0]) and re.fullmatch(r"resp_kvlane-.*-d0", ids[1])
        assert first == {**{name: value for name, value in body.items() if name != "stream"}, **one_token}
        assert second == {**body, "kv_transfer_params": TRANSFER}
        _, page, _ = ask(router.admin, "/decisions?limit=1")
        assert page["decisions"][0]["why"] == "prefill, then decode"


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search_preview"}]},
    ],
)
def test_a_response_that_needs_one_engine_for_more_than_its_prompt_stays_whole(more: dict[str, Any]) -> None:
    with recorders("pd") as (router, (prefill, decode)):
        assert ask(router.address, "/v1/responses", {**RESPONSE, **more})[0] == 200
        assert prefill.seen == [] and len(decode.seen) == 1
        assert "kv_transfer_params" not in decode.bodies()[0]


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
def test_agents_that_begin_alike_share_an_engine(path: str, body: dict[str, Any]) -> None:
    """The router ignored the instructions, which stand before the input."""
    with recorders("ww") as (router, engines):
        for number in range(6):
            text = [{"role": "user", "content": f"{number} hello"}]
            each = {**body, "input": text} if "input" in body else {**body, "messages": text}
            assert ask(router.address, path, each)[0] == 200
        assert sorted(len(engine.seen) for engine in engines) == [0, 6]
        _, page, _ = ask(router.admin, "/decisions?limit=1")
        assert page["decisions"][0]["cached_tokens"] > 400


def test_a_web_page_under_a_name_of_its_own_reaches_no_engine() -> None:
    """A web page may resolve its own name to 127.0.0.1 for a moment (DNS rebinding), and read the answers."""
    with routed([]) as (router, (engine,)):
        for path, body in ((COMPLETIONS, wanted("short")), ("/v1/models", None), ("/health", None)):
            status, answer, _ = ask(router.address, path, body, {"Host": "evil.example"})
            assert status == 421, (path, answer)
            assert "--listen-host evil.example" in answer["error"]["message"]
        assert engine.log() == []
        for host in ("localhost", "localhost:8000", "127.0.0.1", "10.0.0.1:80", "[::1]:8000"):
            assert ask(router.address, COMPLETIONS, wanted("short"), {"Host": host})[0] == 200, host


def test_a_router_answers_to_a_name_that_it_was_given() -> None:
    with routed([], flags=("--listen-host", "router.svc")) as (router, _):
        for host, status in (("router.svc:8000", 200), ("Router.Svc", 200), ("other.svc", 421)):
            assert ask(router.address, COMPLETIONS, wanted("short"), {"Host": host})[0] == status


def test_with_keys_a_router_answers_to_any_name(tmp_path: Path) -> None:
    """A page that rebinds its name has no key."""
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(0o600)
    shown = {"Authorization": "Bearer key", "Host": "llm.example"}
    with routed([], flags=("--api-key-file", str(keys))) as (router, _):
        assert ask(router.address, COMPLETIONS, wanted("short"), shown)[0] == 200


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
def test_keys_that_other_users_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(mode)
    if os.getuid() == 0 and mode & ~0o640 == 0:
        # Root's file for a group of this process is what Kubernetes mounts; another group's is not.
        os.chown(keys, 0, 12345)
    said = refused(keys)
    assert f"its mode is {mode:04o}" in said and f"chmod 600 {keys}" in said


def refused(keys: Path) -> str:
    command = [str(KVLANE), "route", "--worker", "http://127.0.0.1:1", "--api-key-file", str(keys)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_keys_are_refused_and_a_mounted_secret_is_taken(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(0o600)
    os.chown(keys, 12345, 0)
    assert "it belongs to the user 12345" in refused(keys)
    # Root's, for a group of this process: as Kubernetes mounts a secret where a pod has an fsGroup. It mounts links.
    os.chown(keys, 0, os.getegid())
    keys.chmod(0o440)
    link = tmp_path / "link"
    link.symlink_to(keys)
    with (
        FakeEngine() as engine,
        Router("--worker", engine.url, "--api-key-file", str(link), nodes=1) as router,
    ):
        assert ask(router.address, "/v1/models")[0] == 401


def test_quiet_decisions_do_not_tell_which_prompts_others_have_sent() -> None:
    pair = ["--pairs", "kvlane"]
    for flags, told in [((), True), (("--quiet-decisions",), False)]:
        with routed(pair, pair, roles="pd", flags=flags) as (router, _):
            for _ in range(2):
                assert ask(router.address, COMPLETIONS, wanted(LONG, max_tokens=1))[0] == 200
            _, page, _ = ask(router.admin, "/decisions")
            second, first = page["decisions"]
            # The second request stays on the decode engine, which has the prompt. Three members reveal that.
            differing = {name for name in first if first[name] != second[name]} - {"time", "id", "client_id"}
            assert differing == ({"cached_tokens", "why", "prefill"} if told else set()), page
            assert ("cached_tokens" in first) == told
