"""vLLM's connector to kvlane: `{"kv_connector": "KVLaneConnector", "kv_connector_module_path": "kvlane.connector"}`.

connector.py is the class that vLLM calls and never lets an error through; scheduler.py and worker.py are its two
roles; saves.py decides what is saved; layout.py and namespace.py say what a block is and what it means.
"""

from kvlane.connector.connector import KVLaneConnector

__all__ = ["KVLaneConnector"]
