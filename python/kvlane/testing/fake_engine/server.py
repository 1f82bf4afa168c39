"""The paths of a fake engine."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvlane.testing.fake_engine import answers, http, metrics, pairs, requests
from kvlane.testing.fake_engine.faults import BadFault, Faults
from kvlane.testing.fake_engine.generation import Damage, Engine, Generation
from kvlane.testing.fake_engine.log import Entry, Log
from kvlane.testing.fake_engine.models import Models

GENERATING = {"/v1/completions": False, "/v1/chat/completions": True}
"""Paths that generate, and whether each is a chat."""
_CONTROL = {"/faults", "/log"}
_GARBAGE = b"\x16\x03\x01\x00\x05this is no HTTP\x00\xff\r\n\r\n"
_EMBEDDING = [0.0625, -0.125, 0.25, -0.5]


@dataclass(frozen=True)
class Settings:
    """The settings of the paths, beside the engine's."""

    models: Models
    pairing: pairs.Pairing
    tokenizer: requests.Tokenizer | None = None
    pool: str | None = None


class Server:
    """Answers requests; an `http.Handler`."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._models = settings.models
        self._pairing = settings.pairing
        self._tokenizer = settings.tokenizer
        self._pool = settings.pool
        self._engine = engine
        self._faults = Faults()
        self._log = Log()
        self._run = pairs.new_run()
        self._numbers = count(1)
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): lambda _: http.answer(200, answers.dump({"version": "0.0.0+fake"})),
            ("GET", "/v1/models"): lambda _: http.answer(200, answers.dump(self._models.card())),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/faults"): lambda _: http.answer(200, answers.dump(self._faults.shown())),
            ("POST", "/faults"): self._set_faults,
            ("GET", "/log"): self._shown_log,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/embeddings"): self._embed,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("POST", "/reset_prefix_cache"): self._reset_cache,
        }
        self._paths = {path for _, path in self._routes} | set(GENERATING)

    def connected(self, connection: http.Connection) -> bool:
        return self._faults.take("refuse") is None

    def handle(self, connection: http.Connection, request: http.HttpRequest) -> None:
        entry = None
        generates = request.method == "POST" and request.path in GENERATING
        if generates:
            entry = self._log.add(request.path, request.headers, request.body, time.time())
        if (
            self._faults
            and request.path not in _CONTROL
            and self._fails(connection, request, entry, generates)
        ):
            return
        if entry is not None:
            self._generate(connection, request, entry)
            return
        if request.method == "GET" and request.path == "/health":
            seconds = self._faults.take("slow_health")
            if seconds is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(seconds, self._answer, connection, http.answer(200, b""))
                return
        self._answer(connection, self._short_answer(request))

    def _short_answer(self, request: http.HttpRequest) -> bytes:
        route = self._routes.get((request.method, request.path))
        if route is not None:
            try:
                return route(request)
            except requests.BadRequest as error:
                return http.answer(400, answers.error(400, str(error)))
        status, detail = (405, "Method Not Allowed") if request.path in self._paths else (404, "Not Found")
        return http.answer(status, answers.dump({"detail": detail}))

    def _answer(self, connection: http.Connection, data: bytes, close: bool = False) -> None:
        connection.write(data)
        connection.end(close)

    def _fails(
        self, connection: http.Connection, request: http.HttpRequest, entry: Entry | None, generates: bool
    ) -> bool:
        """Carries out the faults that take the place of an answer; False if there is none."""
        faults, path = self._faults, request.path
        if faults.path != path if faults.path is not None else not (generates or path == "/v1/embeddings"):
            return False
        if faults.take("close_idle_connections"):
            connection.close_when_answered()
        if faults.take("hang_before_first_byte"):
            if entry is not None:
                connection.on_lost = lambda: _end(entry, "aborted", None)
            return True
        if faults.take("garbage"):
            _end(entry, "aborted", None)
            self._answer(connection, _GARBAGE, close=True)
            return True
        status, seconds = faults.take("status"), faults.take("retry_after")
        poison = faults.peek("poison")
        if poison is not None and poison.encode() in request.body and faults.take("poison"):
            status = 500
        if status is None and seconds is None:
            return False
        status = status or 503
        kind = "InternalServerError" if status >= 500 else "BadRequestError"
        extra = "" if seconds is None else f"retry-after: {seconds}\r\n"
        _end(entry, "done", status)
        body = answers.error(status, "A fault was switched on.", kind)
        self._answer(connection, http.answer(status, body, extra=extra))
        return True

    def _generate(self, connection: http.Connection, request: http.HttpRequest, entry: Entry) -> None:
        chat = GENERATING[request.path]
        try:
            asked = requests.read_generation(request.body, chat, self._tokenizer)
            model = self._models.names[0] if asked.model is None else asked.model
            if model not in self._models:
                self._refuse(connection, entry, 404, *self._not_found(model))
                return
            leg = pairs.leg_of(asked.body, asked.max_tokens, entry.id, self._pairing)
            self._check_length(asked)
        except (requests.BadRequest, pairs.BadLeg) as error:
            self._refuse(connection, entry, 400, str(error))
            return
        entry.prompt_tokens = asked.prompt_tokens
        entry.leg = leg.name
        name = entry.id or f"{self._run[:16]}{next(self._numbers):016x}"
        request_id = ("chatcmpl-" if chat else "cmpl-") + name
        transfer = None
        if leg.name == "prefill" and not self._faults.take("hand_nothing_over"):
            transfer = pairs.transfer_params(self._pairing, self._run, asked.prompt_tokens, request_id)
        damage = Damage()
        if self._faults and self._faults.path in (None, request.path):
            take = self._faults.take
            damage = Damage(take("die_at_chunk"), take("exit_at_chunk"), bool(take("bad_length")))
        adapter = model if self._models.is_adapter(model) else None
        self._engine.submit(
            Generation(connection, asked, entry, leg, chat, request_id, model, adapter, transfer, damage)
        )

    def _check_length(self, asked: requests.Asked) -> None:
        longest = self._models.max_model_len
        if asked.prompt_tokens + asked.max_tokens > longest:
            raise requests.BadRequest(
                f"The longest context is {longest} tokens, and the request has {asked.prompt_tokens} "
                f"of its prompt and {asked.max_tokens} to generate."
            )

    def _refuse(
        self,
        connection: http.Connection,
        entry: Entry,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        _end(entry, "done", status)
        self._answer(connection, http.answer(status, answers.error(status, message, kind, param)))

    def _not_found(self, model: str) -> tuple[str, str, str]:
        return f"The model `{model}` does not exist.", "NotFoundError", "model"

    def _health(self, _: http.HttpRequest) -> bytes:
        return http.answer(200, b"")

    def _metrics(self, _: http.HttpRequest) -> bytes:
        text = metrics.text(self._models.names[0], self._engine.model, self._engine.counters, self._pool)
        return http.answer(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _set_faults(self, request: http.HttpRequest) -> bytes:
        try:
            self._faults.set(requests.read_json(request.body))
        except BadFault as error:
            raise requests.BadRequest(str(error)) from None
        return http.answer(200, answers.dump(self._faults.shown()))

    def _shown_log(self, request: http.HttpRequest) -> bytes:
        shown = answers.dump(self._log.shown())
        if urllib.parse.parse_qs(request.query).get("clear") == ["1"]:
            self._log.clear()
        return http.answer(200, shown)

    def _tokenize(self, request: http.HttpRequest) -> bytes:
        body = requests.read_json(request.body)
        if "messages" in body:
            prompt = requests.messages_text(body["messages"])
        else:
            prompt = requests.prompt_text(body.get("prompt"))
        ids = requests.token_ids(prompt)
        shown = {"count": len(ids), "max_model_len": self._models.max_model_len, "tokens": ids}
        return http.answer(200, answers.dump({**shown, "token_strs": None}))

    def _embed(self, request: http.HttpRequest) -> bytes:
        body = requests.read_json(request.body)
        model = body.get("model") or self._models.names[0]
        if model not in self._models:
            return http.answer(404, answers.error(404, *self._not_found(model)))
        given = body.get("input")
        many = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        tokens = sum(requests.count_tokens(requests.prompt_text(each)) for each in many)
        data = [{"index": at, "object": "embedding", "embedding": _EMBEDDING} for at in range(len(many))]
        usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return http.answer(
            200, answers.dump({"object": "list", "model": model, "data": data, "usage": usage})
        )

    def _load_adapter(self, request: http.HttpRequest) -> bytes:
        body = requests.read_json(request.body)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise requests.BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if not self._models.load(name, path):
            raise requests.BadRequest(f"The lora adapter '{name}' has already been loaded.")
        return http.answer(200, f"Success: LoRA adapter '{name}' added successfully.".encode(), "text/plain")

    def _unload_adapter(self, request: http.HttpRequest) -> bytes:
        name = requests.read_json(request.body).get("lora_name")
        if not isinstance(name, str) or not name:
            raise requests.BadRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
        if not self._models.unload(name):
            message = f"The lora adapter '{name}' cannot be found."
            return http.answer(404, answers.error(404, message, "NotFoundError", "lora_name"))
        return http.answer(
            200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), "text/plain"
        )

    def _reset_cache(self, _: http.HttpRequest) -> bytes:
        self._engine.clear_cache()
        return http.answer(200, b"")


def _end(entry: Entry | None, state: str, status: int | None) -> None:
    if entry is not None:
        entry.state, entry.status, entry.ended = state, status, time.time()
