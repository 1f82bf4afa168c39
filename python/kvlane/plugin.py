"""vLLM's plugin hook: lets users write `"kv_connector": "KVLaneConnector"` without a module path, and serves
configurations that name vLLM's former `P2pNcclConnector`. With KVLANE_DEEP_EP=1 also the module `deep_ep`, over
`kvlane.moe`, for vLLM's DeepEP backends.

vLLM calls `register` in each of its processes, also in engines that do not use kvlane. The hash seed is therefore
fixed by the connector (`kvlane.connector.namespace.fix_hash_seed`), which only exists where it is wanted and is
built before vLLM draws the seed.
"""

from __future__ import annotations

import logging
import os
import sys

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
    if os.environ.get("KVLANE_DEEP_EP") == "1":
        _provide_deep_ep()


def _provide_deep_ep() -> None:
    """Makes `import deep_ep` give vLLM our module. vLLM looks for one when it imports its layers, after this hook."""
    from kvlane.moe import deep_ep

    if sys.modules.setdefault("deep_ep", deep_ep) is not deep_ep:
        # Log: DeepEP was imported before kvlane's plugin, so vLLM uses it, in spite of KVLANE_DEEP_EP=1. Do: find what
        # imports it, or unset the variable.
        logger.warning("kvlane: deep_ep is imported already, so KVLANE_DEEP_EP=1 has no effect")
        return
    # Log: KVLANE_DEEP_EP=1 is heeded. A line "all-to-all for DeepEP's calls" follows when vLLM uses it. Do: if none
    # follows, start vLLM with the flags that the line names: without data parallelism it has no all-to-all.
    logger.info(
        "kvlane: deep_ep is kvlane.moe; vLLM uses it with --data-parallel-size above 1, --enable-expert-parallel and "
        "--all2all-backend deepep_low_latency or deepep_high_throughput"
    )
