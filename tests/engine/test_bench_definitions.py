"""`kvlane bench serve` means by TTFT, TPOT, ITL and E2EL what vLLM's own `vllm bench serve` means by them."""

from __future__ import annotations

import random

import pytest

from kvlane.bench.load import Timing
from kvlane.bench.serve import round_figures

# Odd, so that the median is one of the values for either tool.
REQUESTS = 21


def test_the_same_answers_get_the_same_figures() -> None:
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    source = random.Random(7)
    timings, outputs = [], []
    for number in range(REQUESTS):
        gaps = [source.uniform(0.002, 0.05) for _ in range(source.choice((0, 1, 30)))]
        chunks = [source.uniform(0.05, 2.0)]
        for gap in gaps:
            chunks.append(chunks[-1] + gap)
        # More tokens than chunks: an engine sends several at once when the client is slow.
        tokens = len(chunks) + (2 if gaps else 0)
        started = 0.1 * number
        # Behind the last token come the usage and the end of the stream.
        timings.append(Timing(started=started, chunks=chunks, tokens=tokens, total=chunks[-1] + 0.01))
        output = RequestFuncOutput(success=True, prompt_len=8, start_time=started)
        output.ttft, output.itl, output.latency, output.output_tokens = chunks[0], gaps, chunks[-1], tokens
        outputs.append(output)
    timings.append(Timing(started=0.0, total=9.0, error="TimeoutError: "))
    outputs.append(RequestFuncOutput(success=False, error="TimeoutError"))

    mine = round_figures(timings)
    prompts = [SampleRequest(prompt="", prompt_len=8, expected_output_len=1)] * len(outputs)
    theirs, _ = calculate_metrics(prompts, outputs, mine["duration_s"], None, [99.0], {})
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert mine[f"{name}_ms"]["mean"] == pytest.approx(getattr(theirs, f"mean_{name}_ms")), name
    for name in ("ttft", "e2el"):
        assert mine[f"{name}_ms"]["p50"] == pytest.approx(getattr(theirs, f"median_{name}_ms")), name
    assert mine["failed"] == theirs.failed == 1
    assert mine["output_tokens"] == theirs.total_output
    assert mine["requests_per_s"] == pytest.approx(theirs.request_throughput)
