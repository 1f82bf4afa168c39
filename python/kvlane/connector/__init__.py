"""vLLM's connector to kvlane: `{"kv_connector": "KVLaneConnector", "kv_connector_module_path": "kvlane.connector"}`.

connector.py is the class that vLLM calls and never lets an error through; scheduler.py and worker.py are its two
roles, which ask the kinds of job in kinds/ what to do; saves.py decides what is saved; layout.py and namespace.py say
what a block is and what it means. Only connector.py, metadata.py and stats.py need vLLM to be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlane.connector.connector import KVLaneConnector

    P2pNcclConnector = KVLaneConnector

__all__ = ["KVLaneConnector", "P2pNcclConnector"]


def __getattr__(name: str) -> type[KVLaneConnector]:
    # Users of vLLM's P2P NCCL connector have its name in their configurations.
    if name in __all__:
        from kvlane.connector.connector import KVLaneConnector

        return KVLaneConnector
    raise AttributeError(f"module 'kvlane.connector' has no attribute {name!r}")
