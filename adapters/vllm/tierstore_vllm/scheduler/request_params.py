"""What a request says of itself in its `kv_transfer_params`."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tierstore.bounded_log import bounded
from tierstore.quoting import quoted

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["RequestParams"]

_logger = bounded(logging.getLogger(__name__))

_CACHE_PARAM = "tierstore.cache"


class RequestParams:
    """Reads the parameters of an engine's requests; tells once of those it does not understand."""

    def __init__(self) -> None:
        self._has_told = False

    def may_be_cached(self, request: "Request") -> bool:
        """Return whether the request may be cached; what cannot be understood may not."""
        params = request.kv_transfer_params or {}
        value = params.get(_CACHE_PARAM, True) if isinstance(params, Mapping) else params
        if not isinstance(value, bool) and not self._has_told:
            self._has_told = True  # each request may bring one
            _logger.warning(
                "request is not cached: kv_transfer_params.%s=%s, expected true or false "
                "(further ones are not told of)",
                _CACHE_PARAM,
                quoted(value),
            )
        return value is True
