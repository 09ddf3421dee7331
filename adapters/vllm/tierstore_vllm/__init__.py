"""tierstore as a KV connector of vLLM 0.32 and 0.33."""

from tierstore_vllm.connector import TierStoreConnector

__all__ = ["TierStoreConnector"]
