"""Cold, warm, engine killed and started again, daemon killed and started again: a real vLLM on a GPU with kvlane.

    python bench/gpu/restart.py --out out/restart                  # eager and CUDA graphs: four starts of the engine
    python bench/gpu/restart.py --modes eager --prompts 4
    python bench/gpu/restart.py --shape tiny --modes eager --prompts 3 --tokens 600 --cache-bytes 500000000 \\
        --kv-cache-bytes 300000000                                 # no GPU: with vLLM for the CPU

| name | TTFT of |
|---|---|
| cold | prompts that nobody has |
| in_gpu | the same again: hits in the engine's own prefix cache |
| warm | after the engine's prefix cache was reset: loaded from the daemon |
| restarted | the first prompts of a new engine, after SIGKILL of the first one at work: loaded from the daemon |
| restarted_in_gpu, restarted_warm | the same again in that engine: hits in its own prefix cache; loaded once more |
| without_daemon | a prompt while there is no daemon, which was killed beside the engine at work: computed |
| again | prompts that were computed and saved after the daemon was back: loaded from the new daemon |

Every engine is a process of its own and gets its commands over a pipe: this script waits for what it says, for the
daemon's status, or for the end of a process. Writes `restart.json` with every single time, `restart.md` and a picture.
The exit status is 1 if a control fails; `CONTROLS` says what they are. (The tiny model's answers depend too little on
one block: `block_matters` fails there, and the command says so.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import model
import pictures
from compare import ENVIRONMENT, HERE, MODES
from measure import POISON, Engine, compared_tokens, summary
from provenance import add_arguments, head, public
from systems import START_PATIENCE_S, SYSTEMS, kvlane_address

from kvlane._core import Tool
from kvlane.bench import report
from kvlane.bench.drawing import save

KVLANE = SYSTEMS["kvlane"]
TIMES = (
    "cold",
    "in_gpu",
    "warm",
    "restarted",
    "restarted_in_gpu",
    "restarted_warm",
    "without_daemon",
    "again",
)
# Tokens of an answer that is compared, and of one that something is killed beneath.
ANSWER, LONG_ANSWER = 16, 128
RECONNECT_PATIENCE_S = 30.0
CONTROLS = {
    "distinct": "every prompt has an answer of its own",
    "block_matters": "one changed block changes the answer",
    "cold_is_cold": "nothing of a new prompt is a hit",
    "warm_hits": "after the reset as many tokens are hits as in GPU memory",
    "warm_same_tokens": "answers with loaded blocks are those with blocks kept in GPU memory",
    "dead_are_noticed": "the daemon counts the killed engine's sessions no longer",
    "restarted_hits": "the new engine's first prompts are hits, of as many tokens",
    "restarted_same_tokens": "its answers are those of the killed engine",
    "restarted_same_bytes": "what it loaded into poisoned memory is what the killed engine had",
    "goes_on": "a request under which the daemon was killed gets all its tokens",
    "computes_without_daemon": "without a daemon a prompt is computed",
    "finds_it_again": f"the engine registers with the new daemon within {RECONNECT_PATIENCE_S:.0f} s",
    "again_hits": "what was saved since is a hit, of as many tokens",
    "again_same_tokens": "answers with these blocks are those with blocks kept in GPU memory",
    "no_exception": "no engine logged an exception",
}


class AskedEngine(Engine):
    """The engine inside its process."""

    async def ask(self, prompt: list[int], tokens: int, first: Callable[[], None]) -> dict[str, Any]:
        """TTFT in ms, the tokens, and how many of the prompt were hits; calls `first` at the first token."""
        self._names += 1
        wanted = self._sampling(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, output_kind=self._kind
        )
        ttft, answer, hits = None, [], 0
        begun = time.perf_counter()
        async for output in self._llm.generate({"prompt_token_ids": prompt}, wanted, f"r{self._names}"):
            if ttft is None:
                ttft = (time.perf_counter() - begun) * 1e3
                first()
            answer += output.outputs[0].token_ids
            hits = max(hits, output.num_cached_tokens or 0)
        return {"ttft": ttft, "tokens": answer, "hits": hits}


async def serve(commands: Connection) -> None:
    """The engine's process: does what it is told until the pipe ends."""
    settings = argparse.Namespace(**commands.recv())
    begun = time.perf_counter()
    engine = AskedEngine(settings)
    ready = time.perf_counter() - begun
    try:
        await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
        commands.send({"done": round(ready, 2)})
        while True:
            name, arguments = await asyncio.to_thread(commands.recv)
            if name == "ask":
                done = await engine.ask(*arguments, first=lambda: commands.send({"event": "first token"}))
            elif name == "forget":
                done = await engine.forget()
            else:
                done = (await engine.on_workers(getattr(model, name), POISON))[0]
            commands.send({"done": done})
    except EOFError:
        engine.shutdown()


class EngineProcess:
    """An engine as it is seen from outside: can be asked, and killed."""

    def __init__(self, settings: argparse.Namespace, log: Path) -> None:
        """Starts it; returns at once."""
        self.log = log
        self._patience = settings.patience
        self._pipe, theirs = Pipe()
        with theirs, log.open("wb") as written:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--engine", str(theirs.fileno())],
                stdout=written,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._pipe.send(vars(settings))

    def done(self) -> Any:
        """The result of the last command; after the start, its seconds."""
        while "done" not in (message := self._next()):
            pass
        return message["done"]

    def ask(self, prompt: list[int], tokens: int = ANSWER) -> dict[str, Any]:
        """See `AskedEngine.ask`."""
        self._pipe.send(("ask", (prompt, tokens)))
        return self.done()

    def begin(self, prompt: list[int]) -> None:
        """Asks for a long answer, and returns at its first token; `done` gives it."""
        self._pipe.send(("ask", (prompt, LONG_ANSWER)))
        if "event" not in self._next():
            raise RuntimeError("an answer came without a first token")

    def call(self, name: str) -> Any:
        """`forget`, which returns once nothing is being saved, or a function of `model` on the first worker."""
        self._pipe.send((name, ()))
        return self.done()

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def close(self) -> None:
        """Ends it, if it runs still."""
        if self._process.poll() is None:
            self._pipe.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def _next(self) -> dict[str, Any]:
        try:
            if self._pipe.poll(self._patience):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"an engine ended by itself; see {self.log}") from None
        raise RuntimeError(f"an engine said nothing for {self._patience} s; see {self.log}")


class Daemon:
    """`kvlane serve`, which can be killed and started again at its address."""

    def __init__(self, settings: argparse.Namespace, folder: Path, log: Path) -> None:
        self._command, self._folder, self._log = KVLANE.server(settings.cache_bytes, folder), folder, log  # type: ignore[misc]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Returns when it answers: the seconds that this took."""
        begun = time.monotonic()
        with self._log.open("ab") as written:
            self._process = subprocess.Popen(
                self._command, stdout=written, stderr=written, start_new_session=True
            )
        while not KVLANE.is_up(self._folder):
            if self._process.poll() is not None or time.monotonic() > begun + START_PATIENCE_S:
                raise RuntimeError(f"the daemon does not start; see {self._log}")
            time.sleep(0.05)
        return round(time.monotonic() - begun, 2)

    def end(self, how: signal.Signals) -> None:
        """Sends the signal and waits for its end."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def settle(self) -> None:
        """Returns when all that was saved is visible."""
        tool = Tool(kvlane_address(self._folder), 5000.0)
        try:
            tool.settle(30_000)
        finally:
            tool.close()

    def wait_for_roles(self, wanted: set[str], between: Callable[[], object] = lambda: None) -> float | None:
        """Returns when engines' sessions are of these roles: the seconds that this took, None if it took too long."""
        begun = time.monotonic()
        tool = Tool(kvlane_address(self._folder), 5000.0)
        try:
            while time.monotonic() < begun + RECONNECT_PATIENCE_S:
                sessions: Any = tool.status()["sessions"]
                if {session["role"] for session in sessions} - {"tool"} == wanted:
                    return round(time.monotonic() - begun, 2)
                between()
                time.sleep(0.05)
        finally:
            tool.close()
        return None


def measure(
    settings: argparse.Namespace, daemon: Daemon, logs: list[Path]
) -> tuple[dict[str, Any], dict[str, bool]]:
    """All that the table above names, of one mode; the controls."""
    source, vocabulary = random.Random(7), model.SHAPES[settings.shape]["vocab_size"]
    found: dict[str, Any] = {"daemon_ready_s": [daemon.start()], "engine_ready_s": []}
    held: dict[str, bool] = {}
    engines: list[EngineProcess] = []

    def draw(tokens: int) -> list[int]:
        return [source.randrange(100, vocabulary) for _ in range(tokens)]

    def engine() -> EngineProcess:
        engines.append(EngineProcess(settings, logs[len(engines)]))
        found["engine_ready_s"].append(engines[-1].done())
        # The engine compiles and allocates here what it does at first, also for hits, with prompts that nobody has.
        own = draw(settings.tokens)
        for prompt in (own, draw(64), own, own):
            engines[-1].ask(prompt)
        return engines[-1]

    def ask(name: str, of: EngineProcess, asked: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        answers = [of.ask(prompt) for prompt in asked]
        found.setdefault(f"{name}_ms", []).append([round(answer["ttft"], 2) for answer in answers])
        report.say(f"    {name}: {' '.join(str(value) for value in found[f'{name}_ms'][-1])} ms")
        return [answer["tokens"] for answer in answers], [answer["hits"] for answer in answers]

    def forget(of: EngineProcess) -> None:
        of.call("forget")
        daemon.settle()

    # Of a prompt of whole blocks an engine may compute one token after a hit in GPU memory, and a block beside a load.
    prompts = [draw(compared_tokens(settings.tokens)) for _ in range(settings.prompts)]
    try:
        first = engine()
        _, hits = ask("cold", first, prompts)
        held["cold_is_cold"] = not any(hits)
        ask("in_gpu", first, prompts)
        kept, kept_hits = ask("in_gpu", first, prompts)
        held["distinct"] = len({tuple(tokens) for tokens in kept}) == len(kept)
        computed = first.call("block_hashes")
        warm = []
        for _ in range(settings.rounds):
            forget(first)
            warm.append(ask("warm", first, prompts))
        held["warm_same_tokens"] = all(tokens == kept for tokens, _ in warm)
        held["warm_hits"] = all(hits == kept_hits for _, hits in warm) and all(kept_hits)
        changed = list(prompts[0])
        changed[64:96] = [(token + 1) % vocabulary for token in changed[64:96]]
        held["block_matters"] = first.ask(changed)["tokens"] != kept[0]

        first.begin(draw(settings.tokens))
        first.kill()
        report.say("    the engine is killed")
        held["dead_are_noticed"] = daemon.wait_for_roles(set()) is not None
        second = engine()
        forget(second)
        second.call("poison")
        back, hits = ask("restarted", second, prompts)
        held["restarted_same_tokens"], held["restarted_hits"] = back == kept, hits == kept_hits
        loaded = second.call("block_hashes")
        differ = model.blocks_that_differ(loaded, computed)
        found["loaded_blocks"], found["loaded_blocks_that_differ"] = len(loaded), differ
        # For each prompt and KV cache group, the block that is computed again and that of the answer.
        again = settings.prompts * 2 * len(computed[0])
        held["restarted_same_bytes"] = len(loaded) > again and differ <= again
        # Engines differ a little: these are what the first loads of this one are beside.
        ask("restarted_in_gpu", second, prompts)
        for _ in range(settings.rounds):
            forget(second)
            ask("restarted_warm", second, prompts)

        second.begin(draw(settings.tokens))
        daemon.end(signal.SIGKILL)
        report.say("    the daemon is killed")
        held["goes_on"] = len(second.done()["tokens"]) == LONG_ANSWER
        second.call("forget")
        _, hits = ask("without_daemon", second, prompts[:1])
        held["computes_without_daemon"] = not any(hits)
        found["daemon_ready_s"].append(daemon.start())
        found["found_again_s"] = daemon.wait_for_roles({"scheduler", "worker"}, lambda: second.ask(draw(64)))
        held["finds_it_again"] = found["found_again_s"] is not None
        second.call("forget")
        for prompt in prompts:
            second.ask(prompt)
        kept = [second.ask(prompt)["tokens"] for prompt in prompts]
        forget(second)
        back, hits = ask("again", second, prompts)
        held["again_same_tokens"], held["again_hits"] = back == kept, hits == kept_hits
        # Before their end, which vLLM's own destructors may complain about.
        written = [log.read_text(errors="replace") for log in logs]
        held["no_exception"] = not any(
            # vLLM warns like this of packages that are not there.
            "Traceback (most recent call last)" in line and " WARNING " not in line
            for text in written
            for line in text.splitlines()
        )
    finally:
        for each in engines:
            each.close()
        daemon.end(signal.SIGTERM)
    return found, held


def publish(result: dict[str, Any], folder: Path) -> int:
    """Writes the JSON file, the table and the picture; 1 if a control failed or a mode did not come to its end."""
    runs = result["runs"]
    report.write_json(folder / "restart.json", result)
    lines = ["| TTFT, median, ms | " + " | ".join(TIMES) + " | controls |", "|---" * (len(TIMES) + 2) + "|"]
    failed = list(result["failures"])
    for mode, run in runs.items():
        wrong = [name for name in CONTROLS if not run["controls"].get(name)]
        failed += [f"{mode}: {name} does not hold: {CONTROLS[name]}" for name in wrong]
        values = " | ".join(f"{run['summary'][name]['p50']:.1f}" for name in TIMES)
        lines.append(f"| {mode} | {values} | {', '.join(wrong) + ' FAILED' if wrong else 'hold'} |")
    versions_line = ", ".join(f"{name} {number}" for name, number in sorted(result["versions"].items()))
    note = f"{versions_line}; {pictures.gpus(result['host'])}; {result['date']}"
    (folder / "restart.md").write_text("\n".join([*lines, "", note, ""]))
    print("\n".join([*lines, "", note, *failed]))
    try:
        if runs:
            save(pictures.restarted(result), folder / "restart.png")
    except ImportError:
        report.say("no picture: matplotlib is missing")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="eager, CUDA graphs")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--prompts", type=int, default=8, help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=10_000, help="of a prompt, about (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds (default %(default)s)")
    parser.add_argument("--cache-bytes", type=int, default=32_000_000_000, help="of the daemon's pool")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share that vLLM may use")
    parser.add_argument("--kv-cache-bytes", type=int, default=0, help="vLLM's KV cache, instead of a share")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--gdn-prefill-backend", help="vLLM's, for linear attention (triton: without FlashInfer)"
    )
    parser.add_argument(
        "--patience", type=float, default=300.0, help="seconds that an engine may say nothing"
    )
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("out/restart"))
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)  # be an engine; the pipe's descriptor
    settings = parser.parse_args()
    if settings.engine is not None:
        os.set_inheritable(settings.engine, False)
        asyncio.run(serve(Connection(settings.engine)))
        return 0
    # Worker processes unpickle functions of `model`; the program `kvlane` is beside this Python or on PATH.
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings.out.mkdir(parents=True, exist_ok=True)
    settings.new_tokens = LONG_ANSWER
    result = head("gpu restart", settings) | {
        "settings": public(settings, ["engine"]),
        "runs": {},
        "failures": [],
    }
    for mode in settings.modes:
        report.say(f"{mode}:")
        with tempfile.TemporaryDirectory() as scratch, report.CpuWatch() as watch:
            connector = KVLANE.connector(settings.cache_bytes, Path(scratch))
            own = {
                "connector": connector,
                "scratch": scratch,
                "eager": mode == "eager",
                "out": str(settings.out),
            }
            of_mode = argparse.Namespace(**vars(settings) | own)
            logs = [settings.out / f"{mode}-engine-{number}.log" for number in (1, 2)]
            try:
                daemon = Daemon(settings, Path(scratch), settings.out / f"{mode}-daemon.log")
                found, held = measure(of_mode, daemon, logs)
            except (RuntimeError, ConnectionError, TimeoutError) as error:
                result["failures"].append(f"{mode}: {error}")
                report.say(f"    FAILED: {error}")
                continue
        times = {name: summary(list(itertools.chain(*found[f"{name}_ms"]))) for name in TIMES}
        more = {"summary": times, "controls": held, "cpu_use": watch.facts}
        result["runs"][mode] = found | more
        # Written after each mode, so that results stay if the rest is cut off.
        report.write_json(settings.out / "restart.json", result)
    result["machine"] = report.machine_facts()
    return publish(result, settings.out)


if __name__ == "__main__":
    sys.exit(main())
