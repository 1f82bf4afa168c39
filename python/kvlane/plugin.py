"""vLLM's plugin hook: lets users write `"kv_connector": "KVLaneConnector"` without a module path.

vLLM calls `register` in each of its processes, also in engines that do not use kvlane. The hash seed is therefore
fixed by the connector (`kvlane.connector.namespace.fix_hash_seed`), which only exists where it is wanted and is
built before vLLM draws the seed.
"""


def register() -> None:
    """Register the connector; calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvlane.connector import affinity

    affinity.remember()
    name = "KVLaneConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "kvlane.connector", name)
