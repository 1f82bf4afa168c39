"""The endpoint under test, through its HTTP pages."""

from __future__ import annotations

import asyncio
import json
import re
import time

from kvlane.bench.extra import aiohttp

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


class NoEndpointError(Exception):
    """The endpoint cannot be measured. The sentence names the URL and says what to do."""


class Endpoint:
    """An OpenAI endpoint by its base URL, without /v1."""

    def __init__(self, base_url: str, api_key: str = "") -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def first_model(self) -> str:
        """The first model that the endpoint names. Raises NoEndpointError if it names none."""
        try:
            return json.loads(await self._text("GET", "/v1/models"))["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoEndpointError(
                f"no endpoint answers at {self.base_url} ({str(error) or type(error).__name__}): start the engine, "
                "or name where it is, such as --base-url http://127.0.0.1:8000"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoEndpointError(
                f"{self.base_url}/v1/models names no model ({error}): --base-url has to be an OpenAI endpoint, "
                "without /v1; one that asks for a token needs --api-key"
            ) from error

    async def counters(self) -> dict[str, float]:
        """Prometheus samples of /metrics, summed over labels, with names without `_total`. Empty without such a
        page."""
        try:
            page = await self._text("GET", "/metrics")
        except (aiohttp.ClientError, ValueError):
            return {}
        samples: dict[str, float] = {}
        for line in page.splitlines():
            if found := _SAMPLE.match(line):
                name = found[1].removesuffix("_total")
                samples[name] = samples.get(name, 0.0) + float(found[2])
        return samples

    async def reset_prefix_cache(self, timeout_s: float = 60.0) -> bool:
        """Empties the engine's own prefix cache, so that hits come from outside. False if the endpoint does not offer
        that. Asks again for a while, because vLLM refuses while blocks are in use, until they are saved.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = await self._text("POST", "/reset_prefix_cache")
                # vLLM up to 0.28 answers with an empty page.
                if not answer.strip() or json.loads(answer).get("success", True):
                    return True
            except (aiohttp.ClientError, ValueError, AttributeError):
                return False
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)

    async def _text(self, method: str, path: str) -> str:
        limits = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=limits, headers=self._headers) as session,
            session.request(method, self.base_url + path) as response,
        ):
            if response.status != 200:
                raise ValueError(f"{method} {self.base_url}{path} answered status {response.status}")
            return await response.text()
