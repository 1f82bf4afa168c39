"""A worker for engines with pipeline stages on the CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class WarmedWorker(CPUWorker):
    """Without a warm-up, which newer versions leave out, the second stage has no room for what the first one sends: its
    first forward pass fails, with any connector and with none."""

    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        return super().determine_available_memory()
