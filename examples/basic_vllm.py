"""One prompt twice, and how many of its tokens came from kvlane each time. First `kvlane serve --pool-size 4gb`, then
this file, with the name of a model or without."""

import sys
import time

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B",
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,  # compiles nothing: starts sooner, and computes a little slower
        kv_transfer_config={"kv_connector": "KVLaneConnector", "kv_role": "kv_both"},
    )
    prompt = "The lanes of a harbour, seen from above, in the order in which the ships come home. " * 60
    one_token = SamplingParams(temperature=0, max_tokens=1)
    # Whatever vLLM does only at its first request, it does now.
    llm.generate("warm up", one_token, use_tqdm=False)

    tokens_from_kvlane = 0
    for number in (1, 2):
        # Empties vLLM's own cache, so that what vLLM calls cached below came from kvlane. A reset gives up saves that
        # are still under way, so the request before gets a second for its own.
        time.sleep(number - 1)
        while not llm.reset_prefix_cache():
            llm.generate("step", one_token, use_tqdm=False)
        started = time.perf_counter()
        (answer,) = llm.generate(prompt, one_token, use_tqdm=False)
        took_ms = (time.perf_counter() - started) * 1000
        cached, tokens = answer.num_cached_tokens or 0, len(answer.prompt_token_ids or [])
        tokens_from_kvlane += cached
        print(f"request {number}: {cached} of {tokens} tokens came from kvlane, {took_ms:.0f} ms")
    print(f"in sum: {tokens_from_kvlane} tokens came from kvlane")
    if tokens_from_kvlane == 0:
        sys.exit(
            "No token came from kvlane. Start a daemon as this user with `kvlane serve --pool-size 4gb`, see with\n"
            "`kvlane status` that it answers, and run this again. The engine's log above says what it missed."
        )
