"""tierstore as a KV connector of vLLM 0.32 and 0.33."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore_vllm.connector import TierStoreConnector

__all__ = ["TierStoreConnector"]


def __getattr__(name: str) -> object:
    # The connector cannot even be imported with a vLLM that lacks a class it derives from; so the
    # check comes first, and its message instead of an ImportError.
    if name != "TierStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierstore_vllm.engine_names import check_engine
    from tierstore_vllm.plugin import register

    check_engine()
    register()
    from tierstore_vllm.connector import TierStoreConnector

    return TierStoreConnector
