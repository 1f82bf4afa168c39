"""The daemon's live page in a real browser: it shows what /metrics says, loads nothing from elsewhere, and recovers."""

from __future__ import annotations

import json
import random
import re
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import browser_pages
import pytest
from browser_pages import UNREACHED, Chromium, LivePage, Metrics, answer, number, wait_agreement
from matplotlib.image import imread
from patterns import NAMESPACE, block_hash
from playwright.sync_api import Error, expect
from processes import Daemon, Engine, until
from wire import GET_STATUS, Wire

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = 48
PROMPTS = 4
"""Of so many blocks, which is more than the pool's 128."""
HOSTILE = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script>'
LONG_NAME = (HOSTILE + "long " * 1000)[:4096]
# A browser that hangs costs a minute or two of a run, in place of ten.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser_pages.launched() as found:
        yield found


@pytest.fixture(scope="module")
def rested() -> Iterator[Daemon]:
    """A daemon with an SSD that has served an engine, which is still connected. Its figures change no more."""
    with ExitStack() as stack:
        # Short, because the path of a socket has at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-")))
        daemon = Daemon(folder, "--gpu", "off", "--ssd", f"{folder}/blocks:64mib", pool="2mib")
        stack.callback(daemon.kill)
        daemon.start()
        engine = Engine(daemon.address, "secret-engine")
        stack.callback(engine.kill)
        engine.wait_connected()
        prompts = [f"prompt-{number}" for number in range(PROMPTS)]
        for prompt in prompts:
            assert engine.call("save", prompt=prompt, count=BLOCKS)["ok"]
            daemon.settle()
        # The first ones have made room for the last ones, and come from the SSD.
        for prompt in (*prompts, prompts[-1], "unknown"):
            engine.call("check", prompt=prompt, count=BLOCKS)
        daemon.settle()
        until("hits are counted", lambda: Metrics(daemon.http_at).sum("kvlane_hit_bytes_total", tier="ssd"))
        yield daemon


# What the pages answer


def test_the_policy_lets_nothing_in_but_the_page_s_own_script_and_style(daemon: Daemon) -> None:
    nonces = set()
    for _ in range(2):
        status, headers, body = answer(daemon.http_at, "/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy and "*" not in policy and "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        tags = re.findall(r"<(?:script|style)\b[^>]*>", body)
        assert len(tags) == 2
        named = {*re.findall(r"nonce-(\w+)", policy), *(re.findall(r'nonce="(\w+)"', tag)[0] for tag in tags)}
        assert len(named) == 1, "one of this answer"
        nonces |= named
    assert len(nonces) == 2 and all(len(nonce) == 32 for nonce in nonces)


def test_pages_answer_only_to_the_daemon_s_own_names(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("--http-host", "cache.example")
    for path in ("/", "/live"):
        assert answer(daemon.http_at, path, "cache.example")[0] == 200
        status, _, body = answer(daemon.http_at, path, "evil.example")
        assert status == 421 and "--http-host evil.example" in json.loads(body)["error"]


@pytest.mark.parametrize("query", ["after=x", "after=-1", "after=1.5", "after=18446744073709551616"])
def test_a_number_of_a_sample_that_is_none_gets_a_sentence(daemon: Daemon, query: str) -> None:
    status, _, body = answer(daemon.http_at, f"/live?{query}")
    assert status == 400
    assert json.loads(body) == {"error": "after is no number: ask for /live?after=0, or without a query"}


def names_in(value: Any) -> Iterator[str]:
    """All names of members in a document."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield name
            yield from names_in(member)
    elif isinstance(value, list):
        for member in value:
            yield from names_in(member)


def test_figures_tell_a_stranger_no_paths_users_or_processes(rested: Daemon) -> None:
    _, _, text = answer(rested.http_at, "/live")
    figures = json.loads(text)
    assert figures["ssd"]["blocks"] > 0 and figures["sessions"]["worker"] == 1, (
        "the control: there is much to tell"
    )
    engine = rested.engines()[0]
    secrets = [
        str(rested.path.parent),
        "kvlane.sock",
        "/blocks",
        engine["engine"],
        "kvlane tests",
        block_hash("prompt-0", 0).hex(),
        "prompt-0",
    ]
    assert [secret for secret in secrets if secret in text] == []
    assert not [
        name for name in names_in(figures) if re.search("pid|uid|user|path|file|host|address|engine_id", name)
    ]
    # Samples and times have digits of all kinds.
    told = json.dumps({**figures, "history": {}, "uptime_seconds": 0, "run": ""})
    assert not [pid for pid in (rested.pid, engine["pid"]) if re.search(rf"\b{pid}\b", told)]


def test_a_reader_gets_each_sample_once(daemon: Daemon) -> None:
    numbers: list[int] = []
    values: list[float] = []

    def follow() -> bool:
        history = history_of(daemon, after=len(numbers))
        numbers.extend(range(history["first"], history["next"]))
        values.extend(history["series"]["used_bytes"])
        return len(numbers) >= 3

    until("three samples", follow)
    assert numbers == list(range(len(numbers)))
    series = history_of(daemon)["series"]
    assert series["used_bytes"][: len(values)] == values
    assert len({len(each) for each in series.values()}) == 1


def history_of(daemon: Daemon, after: int = 0) -> dict[str, Any]:
    return json.loads(answer(daemon.http_at, f"/live?after={after}")[2])["history"]


# The page in a browser


def test_the_page_shows_what_metrics_says(chromium: Chromium, rested: Daemon) -> None:
    with chromium.open(rested.http_at) as shown:
        shown.wait_answered()
        wait_agreement(lambda: figures_and_metrics(shown, Metrics(rested.http_at)))
        (row,) = shown.rows("Models")
        assert (row["Model"], row["Namespace"]) == ("pattern", NAMESPACE.hex())
        (capacity,) = shown.card("Blocks on the SSD").parts(".* blocks; files of (.*)")
        assert 0 < number(capacity)[0] <= 64 << 20, "a file has some room for itself"


def figures_and_metrics(shown: LivePage, metrics: Metrics) -> dict[str, tuple[str, float]]:
    """Texts of the page, each with the number that it has to be."""
    one = metrics.sum
    used, pool = one("kvlane_pool_used_bytes"), one("kvlane_pool_bytes")
    used_text, pool_text = shown.card("Used").parts("(.*) of (.*)")
    blocks = shown.card("Blocks")
    leased, claimed = blocks.parts("(.*) leased, (.*) being saved")
    lower = shown.card("Hit on SSD and other hosts")
    from_ssd, from_peers = lower.parts("SSD (.*), other hosts (.*)")
    on_ssd = shown.card("Blocks on the SSD")
    (ssd_blocks,) = on_ssd.parts("(.*) blocks; files of .*")
    workers = shown.card("Workers connected")
    schedulers, tools, lost = workers.parts("schedulers: (.*), tools: (.*), lost: (.*)")
    hit = {tier: one("kvlane_hit_bytes_total", tier=tier) for tier in ("ram", "ssd", "peers")}
    compared = {
        "pool used": (shown.card("Used").value, used / pool),
        "used bytes": (used_text, used),
        "pool bytes": (pool_text, pool),
        "blocks": (blocks.value, one("kvlane_blocks")),
        "leased": (leased, one("kvlane_leased_blocks")),
        "claimed": (claimed, one("kvlane_claimed_blocks")),
        "saved": (shown.card("Saved").parts("(.*) since the start")[0], one("kvlane_saved_bytes_total")),
        "queue": (
            shown.card("Blocks that wait for their checksum").value,
            one("kvlane_seal_queue_blocks"),
        ),
        "hit in RAM": (shown.card("Hit in RAM since the start").value, hit["ram"]),
        "hit lower": (lower.value, hit["ssd"] + hit["peers"]),
        "hit on SSD": (from_ssd, hit["ssd"]),
        "hit at peers": (from_peers, hit["peers"]),
        "SSD bytes": (on_ssd.value, one("kvlane_ssd_bytes")),
        "SSD blocks": (ssd_blocks, one("kvlane_ssd_blocks")),
        "SSD waiting": (
            shown.card("Blocks that wait to be written").value,
            one("kvlane_ssd_waiting_blocks"),
        ),
        "workers": (workers.value, one("kvlane_sessions", role="worker")),
        "schedulers": (schedulers, one("kvlane_sessions", role="scheduler")),
        "tools": (tools, one("kvlane_sessions", role="tool")),
        "lost": (lost, one("kvlane_limbo_sessions")),
        "waiting": (
            shown.card("Lookups that wait for another engine").value,
            one("kvlane_hand_offs_waiting"),
        ),
    }
    for window in ("15m", "1h", "24h"):
        gauge = shown.card(f"Hits of the last {window}")
        ceiling, looked_up = gauge.parts("without a limit (.*); of (.*) blocks")
        ratio = one("kvlane_hit_ratio", window=window)
        compared |= {
            f"hits of {window}": (gauge.value, ratio),
            f"ceiling of {window}": (ceiling, max(ratio, one("kvlane_hit_ceiling_ratio", window=window))),
            f"blocks of {window}": (looked_up, one("kvlane_hit_window_blocks", window=window)),
        }
    (row,) = shown.rows("Models")
    hits, misses = (one(f"kvlane_{kind}_blocks_total", name="pattern") for kind in ("hit", "missed"))
    # Else some comparison would be one of zeros.
    assert min(hit["ram"], hit["ssd"], misses, one("kvlane_evicted_blocks_total")) > 0
    return compared | {
        "engines": (row["Engines"], one("kvlane_engines", name="pattern")),
        "blocks of the model": (row["Blocks"], one("kvlane_namespace_blocks", name="pattern")),
        "bytes of the model": (row["Size"], one("kvlane_namespace_bytes", name="pattern")),
        "hits of the model": (row["Hits"], hits / (hits + misses)),
    }


def test_a_page_follows_engines_that_come_work_and_die(
    chromium: Chromium, daemon: Daemon, make_engine: MakeEngine
) -> None:
    with chromium.open(daemon.http_at) as shown:
        shown.wait_problem("info: No engine is connected.")
        assert shown.rows("Models") == []
        engine = make_engine(daemon, "a")
        engine.wait_connected()
        shown.wait_no_problem()
        expect(shown.value("Workers connected")).to_have_text("1")
        assert engine.call("save", prompt="p", count=7)["ok"]
        daemon.settle()
        expect(shown.value("Blocks")).to_have_text("7")
        engine.kill()
        shown.wait_problem("info: No engine is connected.")
        expect(shown.value("Workers connected")).to_have_text("0")


def test_problems_are_said_in_words(
    chromium: Chromium, folder: Path, cleanup: ExitStack, make_engine: MakeEngine
) -> None:
    home = folder / "home"
    home.mkdir()
    daemon = Daemon(home, "--gpu", "off", pool="1mib")
    cleanup.callback(daemon.kill)
    daemon.start()
    with chromium.open(daemon.http_at) as shown:
        engine = make_engine(daemon, "a")
        engine.wait_connected()
        assert engine.call("save", prompt="p", count=64)["ok"]
        daemon.settle()
        assert engine.call("lookup", prompt="p", count=64)["tokens"], "holds all of the pool"
        engine.call("save", prompt="q", count=8)
        shown.wait_problem(re.compile(r"warning: \d+ blocks were not saved in the last ten minutes"))
        with Wire(daemon.path) as wire:
            wire.refused(GET_STATUS)
        shown.wait_problem("requests of engines or tools were refused")
        shutil.rmtree(home)
        home.write_text("something else")
        shown.wait_problem("critical: Engines cannot reach the daemon's socket.")
        assert "critical" in shown.problems()[0], "the worst comes first"
        expect(shown.state).to_have_text(re.compile("engines cannot connect"))
        expect(shown.state).to_have_class("lost")
        home.unlink()
        expect(shown.state).not_to_have_class("lost")


def test_damage_on_the_ssd_is_said_in_words(
    chromium: Chromium, make_daemon: MakeDaemon, make_engine: MakeEngine, folder: Path
) -> None:
    path = folder / "blocks"
    daemon = make_daemon("--ssd", f"{path}:8mib", pool="2mib")
    engine = make_engine(daemon, "a")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="p", count=64)["ok"]
    assert daemon.stop() == 0
    dice = random.Random(7)
    with path.open("r+b") as file:
        # Beyond the superblock; every second place hits a page that holds something.
        for at in range(1 << 20, 3 << 20, 64 << 10):
            file.seek(at + dice.randrange(4096))
            file.write(b"\x55")
    daemon.start()
    engine.wait_connected(boot)
    engine.call("check", prompt="p", count=64)
    with chromium.open(daemon.http_at) as shown:
        shown.wait_problem("blocks on the SSD had wrong bytes and were dropped. Check the disk's own health.")


def test_a_page_survives_its_daemon(
    chromium: Chromium, make_daemon: MakeDaemon, make_engine: MakeEngine, folder: Path
) -> None:
    daemon = make_daemon("--ssd", f"{folder}/blocks:8mib")
    engine = make_engine(daemon, "a")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="p", count=7)["ok"]
    daemon.settle()
    with chromium.open(daemon.http_at, tolerated=UNREACHED) as shown:
        shown.wait("series.used_bytes && series.used_bytes.some((value) => value > 0)")
        before = shown.headings()
        daemon.kill()
        shown.wait_lost()
        expect(shown.age).to_have_text(re.compile(r"^The figures are .* s old\.$"))
        assert shown.card("Blocks").value == "7", "the last figures stay"
        assert shown.headings() == before
        # Without its SSD: the new daemon has another set of sections.
        daemon.flags = ()
        began = time.monotonic()
        daemon.start()
        engine.wait_connected(boot)
        shown.wait_answered()
        expect(shown.value("Workers connected")).to_have_text("1")
        up, step = number(shown.age.inner_text().removeprefix("up "))
        assert up <= time.monotonic() - began + step
        assert shown.headings() == [name for name in before if name != "SSD"]
        expect(shown.page.locator("table")).to_have_count(1)
        assert shown.card("Blocks").value == "0"
        shown.wait_next()
        samples = shown.samples("used_bytes")
        assert samples and set(samples) == {0}, "none of the former daemon's"


def test_a_hidden_page_does_not_ask(chromium: Chromium, daemon: Daemon) -> None:
    # The page's clock can be told to run.
    with chromium.open(
        daemon.http_at, is_hurried=False, before=lambda shown: shown.page.clock.install()
    ) as shown:
        shown.wait_answered()
        shown.wait("asked >= 2")
        asked = shown.hide(True)
        # A question that was under way has its answer, after which the page would ask again.
        shown.page.clock.run_for(600_000)
        assert shown.asked() == asked
        shown.hide(False)
        shown.wait(f"asked >= {asked + 2}")
        # Its charts have no gap and nothing twice.
        samples = shown.samples("used_bytes")
        assert samples == history_of(daemon)["series"]["used_bytes"][: len(samples)]


def test_a_page_asks_one_question_at_a_time(chromium: Chromium, rested: Daemon) -> None:
    """Brought to the front while its question was under way, a page asked a second time from the same sample on. The
    second answer did not fit behind the first, so the charts lost all that they had shown."""
    held: list[Any] = []
    is_held = True
    with chromium.open(rested.http_at) as shown:
        shown.wait_answered()
        shown.wait("series.used_bytes.length >= 3")
        shown.page.route(
            re.compile(r"/live\?"), lambda route: held.append(route) if is_held else route.continue_()
        )
        until("a question is under way", lambda: shown.asked() and held)
        shown.hide(True)
        asked = shown.asked()
        shown.hide(False)
        # A second question would be asked by a timer of 0 ms, which fires before this one.
        shown.page.evaluate("() => new Promise((done) => setTimeout(done, 20))")
        assert shown.asked() == asked
        is_held = False
        for route in held:
            route.continue_()
        shown.wait_next()
        assert len(shown.samples("used_bytes")) >= 3


def test_a_page_that_is_opened_later_shows_what_was_before(chromium: Chromium, rested: Daemon) -> None:
    before = history_of(rested)["series"]["saved_bytes"]
    assert any(before), "the control"
    with chromium.open(rested.http_at) as shown:
        shown.wait_answered()
        samples = shown.samples("saved_bytes")
        points = shown.chart("Saved").removeprefix("M").split("L")
        assert samples == history_of(rested)["series"]["saved_bytes"][: len(samples)]
        assert len(before) <= len(samples) <= len(points)
        heights = [float(point.split()[1]) for point in points]
        assert min(heights) == 3 and max(heights) == 97, "from the chart's top to its bottom"


def test_a_page_says_why_an_answer_is_none(chromium: Chromium, rested: Daemon) -> None:
    with chromium.open(rested.http_at, tolerated="status of 503") as shown:
        shown.wait_answered()
        shown.page.route(re.compile(r"/live\?"), lambda route: route.fulfill(status=503, body="busy"))
        expect(shown.state).to_have_text("No answer (it answered 503); trying again every second.")
        expect(shown.state).to_have_class("lost")


def test_a_page_of_another_version_is_loaded_anew(chromium: Chromium, rested: Daemon) -> None:
    """After an upgrade the former version's script would read figures that it does not know."""
    with chromium.open(rested.http_at) as shown:
        shown.wait_answered()
        with shown.page.expect_navigation():
            shown.page.evaluate("""() => {
              const ask = window.fetch;
              window.fetch = async (...given) => {
                const figures = await (await ask(...given)).json();
                return new Response(JSON.stringify({ ...figures, version: 'kvlane 9.9.9' }));
              };
            }""")
        shown.wait_answered()
        shown.wait_next()
        assert shown.requests.count(shown.url) == 2, "once"


def test_the_state_is_read_out_once(chromium: Chromium, daemon: Daemon) -> None:
    """A screen reader reads out each change of the state; the time that the daemon is up was a part of it."""
    with chromium.open(daemon.http_at) as shown:
        shown.wait_answered()
        shown.page.evaluate("""() => {
          window.changes = 0;
          const count = (list) => { window.changes += list.length; };
          const all = { childList: true, characterData: true, subtree: true, attributes: true };
          new MutationObserver(count).observe(document.getElementById('state'), all);
        }""")
        age = shown.age.inner_text()
        expect(shown.age).not_to_have_text(age)
        assert shown.page.evaluate("changes") == 0


def test_links_of_gpus_are_shown_from_the_first_load_on(chromium: Chromium, daemon: Daemon) -> None:
    """A page that was opened before a GPU had loaded anything never showed them."""
    links: list[dict[str, int]] = []
    with chromium.open(
        daemon.http_at, before=lambda shown: shown.answer_instead(lambda figures: figures.update(links=links))
    ) as shown:
        shown.wait_answered()
        expect(shown.value("Loaded over GPU links")).to_have_count(0)
        links.append({"gpu": 3, "bytes": 5_000_000})
        expect(shown.value("Loaded over GPU links")).to_have_count(1)
        assert shown.card("Loaded over GPU links").hint == "GPU 3: 5.00 MB"


# Names, sizes, and people


def model(name: str, number: int) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": f"{number:032x}",
        "engines": 1,
        "blocks": number,
        "bytes": number << 14,
        "hit_blocks": number,
        "missed_blocks": 1,
    }


def test_names_of_engines_are_text(chromium: Chromium, daemon: Daemon, make_engine: MakeEngine) -> None:
    for at, name in enumerate((HOSTILE, LONG_NAME)):
        make_engine(daemon, f"e{at}", model=name, namespace=f"{at:032x}").wait_connected()
    with chromium.open(daemon.http_at) as shown:
        shown.wait_answered()
        expect(shown.page.locator("tbody tr")).to_have_count(2)
        # The daemon keeps so much of a name.
        assert {row["Model"] for row in shown.rows("Models")} == {HOSTILE, LONG_NAME[:256]}
        assert shown.page.evaluate("window.ran") is None
        expect(shown.page.locator("img")).to_have_count(0)


def test_a_thousand_models_with_long_names(chromium: Chromium, daemon: Daemon) -> None:
    names = [HOSTILE, LONG_NAME, *(f"model {number}" for number in range(998))]
    models = [model(name, number) for number, name in enumerate(names)]
    with chromium.open(
        daemon.http_at,
        before=lambda shown: shown.answer_instead(lambda figures: figures.update(models=models)),
    ) as shown:
        shown.wait_answered()
        rows = shown.rows("Models")
        assert [row["Model"] for row in rows] == names
        assert rows[999]["Blocks"] == "999"
        expect(shown.page.locator("caption")).to_have_text("Models: 1,000")
        assert shown.page.evaluate("window.ran") is None
        assert shown.width() == 1280
        models[500:] = []
        expect(shown.page.locator("caption")).to_have_text("Models: 500")
        assert len(shown.rows("Models")) == 500


def trouble(figures: dict[str, Any]) -> None:
    """A problem of each severity, and names that are too long for any screen."""
    figures["problems"] = [
        {"severity": severity, "text": f"{severity} " * 30 + "x" * 300, "action": "Do something about it."}
        for severity in ("critical", "warning", "info")
    ]
    figures["models"] = [model(name, number) for number, name in enumerate((HOSTILE, LONG_NAME, "short"))]


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_no_part_is_wider_than_the_screen(chromium: Chromium, rested: Daemon, width: int) -> None:
    with chromium.open(
        rested.http_at, width=width, before=lambda shown: shown.answer_instead(trouble)
    ) as shown:
        shown.wait_answered()
        assert shown.width() <= width
        columns = shown.columns()
        assert columns == 1 if width == 360 else columns >= 4


def test_all_of_it_is_reached_with_the_keyboard(chromium: Chromium, daemon: Daemon) -> None:
    models = [model(f"model {number}", number) for number in range(100)]
    with chromium.open(
        daemon.http_at,
        before=lambda shown: shown.answer_instead(lambda figures: figures.update(models=models)),
    ) as shown:
        shown.wait_answered()
        focused = shown.page.locator(":focus")
        shown.page.keyboard.press("Tab")
        expect(focused).to_have_attribute("aria-label", "Models")
        assert focused.evaluate("it => getComputedStyle(it).outlineStyle") == "solid", (
            "people see where they are"
        )
        shown.page.keyboard.press("End")
        shown.wait("document.activeElement.scrollTop > 1000")
        for path in ("/metrics", "/health"):
            shown.page.keyboard.press("Tab")
            expect(focused).to_have_attribute("href", path)


@pytest.mark.parametrize(
    ("is_dark", "width"), [(False, 1280), (True, 1280), (False, 360)], ids=["light", "dark", "narrow"]
)
def test_axe_finds_nothing_serious(chromium: Chromium, rested: Daemon, is_dark: bool, width: int) -> None:
    with chromium.open(
        rested.http_at, width=width, is_dark=is_dark, tolerated=UNREACHED,
        before=lambda shown: shown.answer_instead(trouble),
    ) as shown:  # fmt: skip
        shown.wait_answered()
        assert shown.grave_findings() == []
        shown.page.route(re.compile(r"/live\?"), lambda route: route.abort())
        shown.wait_lost()
        assert shown.grave_findings() == []


def test_dark_light_and_narrow_look_as_they_should(chromium: Chromium, rested: Daemon) -> None:
    def brightness(width: int, is_dark: bool) -> tuple[float, int]:
        with chromium.open(rested.http_at, width=width, is_dark=is_dark) as shown:
            shown.wait_answered()
            pixels = imread(BytesIO(shown.page.screenshot()))
            return float(pixels[:, :, :3].mean()), shown.page.evaluate(
                "document.documentElement.scrollHeight"
            )

    light, height = brightness(1280, False)
    dark, dark_height = brightness(1280, True)
    narrow, narrow_height = brightness(360, False)
    assert light > 0.85 and narrow > 0.85 and dark < 0.25
    assert height == dark_height and narrow_height > 1.5 * height


def test_the_policy_holds_in_the_browser(chromium: Chromium, daemon: Daemon) -> None:
    """The control of all tests of names: would a name become markup, nothing of it could run or ask for anything."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        address = f"127.0.0.1:{elsewhere.getsockname()[1]}"
        with chromium.open(daemon.http_at, is_checked=False) as shown:
            shown.wait_answered()
            violations = shown.page.evaluate(f"""async () => {{
              const seen = [];
              document.addEventListener('securitypolicyviolation', (event) => seen.push(event.effectiveDirective));
              const box = document.createElement('div');
              box.innerHTML = '<i style="color: red" onclick="window.ran = 1"></i><img src="http://{address}/">';
              document.body.append(box);
              box.firstChild.click();
              const script = document.createElement('script');
              script.textContent = 'window.ran = 1';
              document.body.append(script);
              await fetch('http://{address}/').catch(() => {{}});
              const deadline = Date.now() + 30000;
              while (new Set(seen).size < 5 && Date.now() < deadline) await new Promise((done) => setTimeout(done, 10));
              return [...new Set(seen)].sort();
            }}""")
            assert violations == [
                "connect-src",
                "img-src",
                "script-src-attr",
                "script-src-elem",
                "style-src-attr",
            ]
            assert shown.page.evaluate("window.ran") is None
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_the_browser_reaches_nothing_but_this_machine(chromium: Chromium, daemon: Daemon) -> None:
    """The control of what the other tests say of a network that is cut."""
    with chromium.open(daemon.http_at, is_checked=False) as shown:
        for url in ("http://192.0.2.1/", "http://kvlane.example/"):
            with pytest.raises(Error, match="net::ERR_"):
                shown.page.goto(url)


# Without a browser


def test_without_chromium_ci_fails_and_others_skip(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(
        pytest.fail.Exception, match=r"no Chromium: run python scripts/browser.py .*without CI"
    ):
        browser_pages.need("chromium")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"no Chromium: run python scripts/browser.py, as root"):
        browser_pages.need("chromium")


def test_the_picture_of_the_page_is_there() -> None:
    """bench/live_page/picture.py makes it."""
    picture = (ROOT / "docs/live-page.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) <= 250_000
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 1280 and 800 <= height <= 2000
