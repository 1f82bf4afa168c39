"""vLLM's plugin hook: lets users write `"kv_connector": "KVLaneConnector"` without a module path, and serves
configurations that name vLLM's former `P2pNcclConnector`.

vLLM calls `register` in each of its processes, also in engines that do not use kvlane. The hash seed is therefore
fixed by the connector (`kvlane.connector.namespace.fix_hash_seed`), which only exists where it is wanted and is
built before vLLM draws the seed.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.kvlane")
_registered: set[str] = set()
NAMES = ("KVLaneConnector", "P2pNcclConnector")


def register() -> None:
    """Register the connector; calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvlane.connector import affinity

    affinity.remember()
    for name in NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvlane.connector", name)
        elif name not in _registered:
            # Log: another connector has this name, so configurations with it do not use kvlane. Do: write
            # "kv_connector": "KVLaneConnector" where kvlane is meant.
            logger.info("kvlane: vLLM has a connector %s already, which stays as it is", name)
        _registered.add(name)
