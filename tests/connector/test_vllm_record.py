"""`kvlane record` of a daemon that a real vLLM uses: each request is in the file with its lengths, answers are blocks
of a conversation's next turn, and a replay hits what the daemon hit."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from busy import stretched
from engine import BLOCK, engines, prompt
from stores import DaemonStore

pytestmark = pytest.mark.old_vllm
TURNS = 4
CHATS = 3
ANSWER = 2 * BLOCK


def expanded(ids: list[Any]) -> list[int]:
    return [
        block for each in ids for block in (range(each[0], each[1] + 1) if isinstance(each, list) else [each])
    ]


def test_a_recorded_conversation_is_replayed_as_it_was(
    model: Path, store: DaemonStore, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    command = ["kvlane", "record", str(file), "--addr", store.address]
    served = []
    with engines(store.address) as start:
        engine = start(model)
        engine.generate(prompt("before", 3 * BLOCK), 2)
        engine.drain()
        recorder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + stretched(30)
        while not file.exists():
            assert time.monotonic() < deadline and recorder.poll() is None
            time.sleep(0.01)
        # Shorter than a block, so never looked up; the engine hears by the first lookup that it is recorded.
        turns = {chat: prompt(f"chat-{chat}", 3 * BLOCK + 5) for chat in range(CHATS)}
        for _ in range(TURNS):
            for chat, said in turns.items():
                answer, _ = engine.generate(said, ANSWER)
                served.append((len(said), len(answer)))
                turns[chat] = said + answer + prompt(f"{chat}-{len(said)}", 7)
                engine.forget()
                store.settle()
        engine.generate(prompt("short", BLOCK // 2), 3)
        served.append((BLOCK // 2, 3))
        engine.drain()
        recorder.send_signal(signal.SIGINT)
        said, _ = recorder.communicate(timeout=stretched(30))
    header, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    requests = [line for line in lines if "timestamp" in line]
    assert [(each.get("input_length"), each.get("output_length")) for each in requests] == served, said
    assert header["tokens_per_block"] == BLOCK and header["is_complete"] and header["dropped"] == 0
    # A turn's prompt begins with the blocks that the turn before looked up and saved.
    of_chat = requests[0 : CHATS * TURNS : CHATS]
    for before, after in itertools.pairwise(of_chat):
        known = expanded(before["hash_ids"]) + expanded(before.get("saved_ids", []))
        assert expanded(after["hash_ids"])[: len(known)] == known
        assert after["ram_blocks"] == len(known), "the daemon had all of them"
    replayed = subprocess.run(
        ["kvlane", "replay", str(file), "--beside", "--json"], stdout=subprocess.PIPE, check=True
    )
    beside = json.loads(replayed.stdout)["beside"]
    assert beside["daemon_hit_percent"] == pytest.approx(beside["replay_hit_percent"], abs=0.1)
    assert beside["daemon_hit_percent"] > 50
