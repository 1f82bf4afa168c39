"""One prompt twice: computed, then loaded from the daemon. First `kvlane serve --pool-size 4gb`, then this file."""

import sys
import time

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B",
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config={"kv_connector": "KVLaneConnector", "kv_role": "kv_both"},
    )
    prompt = "The lanes of a harbour, seen from above, in the order in which the ships come home. " * 60
    one_token = SamplingParams(temperature=0, max_tokens=1)
    llm.generate("warm up", one_token)

    for round_name in ("computed", "loaded"):
        started = time.perf_counter()
        (answer,) = llm.generate(prompt, one_token, use_tqdm=False)
        took_ms = (time.perf_counter() - started) * 1000
        print(f"{round_name}: {took_ms:.0f} ms for {len(answer.prompt_token_ids)} tokens")
        # Empties vLLM's own cache; refused until the save is done. What is left is what kvlane keeps.
        while not llm.reset_prefix_cache():
            llm.generate("step", one_token, use_tqdm=False)
