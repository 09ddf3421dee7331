"""Makes `kv_connector: TierStoreConnector` known to vLLM by its name.

vLLM calls `register` in each of its processes, since the package declares it as an entry point of
`vllm.general_plugins`. `MultiConnector` looks its children's classes up by name alone, also those
that were given with a module path; so looking up the class registers it, too.
"""

import logging

from tierstore.bounded_log import bounded
from tierstore.quoting import named

__all__ = ["CONNECTOR_NAME", "register"]

_logger = bounded(logging.getLogger(__name__))

CONNECTOR_NAME = "TierStoreConnector"


def register() -> None:
    """Tell vLLM where the connector's class is; idempotent, imports no class, never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(CONNECTOR_NAME, "tierstore_vllm", CONNECTOR_NAME)
    except ValueError:
        pass  # it is known already
    except Exception as error:  # noqa: BLE001 - a plug-in's outermost frame; vLLM must go on
        _logger.warning(
            "%s cannot be named without kv_connector_module_path: cause=%s",
            CONNECTOR_NAME,
            named(error),
        )
