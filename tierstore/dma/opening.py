"""Chooses the copy engine by the device on which the KV caches lie."""

import re
from collections.abc import Callable

from tierstore.config import GpuConfig
from tierstore.dma.background import Spawn, no_io
from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import CopyEngine
from tierstore.errors import LayoutError
from tierstore.metrics import Counters

__all__ = ["open_copy_engine"]


def open_copy_engine(
    device: str,
    config: GpuConfig,
    *,
    counters: Counters,
    spawn: Spawn | None,
    is_io_under_way: Callable[[], bool] = no_io,
    compute_stream: Callable[[], int] | None = None,
) -> CopyEngine:
    """Return an engine without regions for `cpu` or `cuda:<index>`.

    What `spawn` runs gives way to its copies, and while `is_io_under_way`; see `BackgroundTurns`.

    Raises:
        LayoutError: there is no engine for such a device.
        MissingExtraError: CuPy is not installed.
        DeviceError: there is no such GPU, or no driver.
    """
    if device == "cpu":
        return HostCopyEngine(spawn, is_io_under_way)
    if re.fullmatch(r"cuda:\d+", device) is None:
        raise LayoutError(f"no copy engine for device {device!r}: expected cpu or cuda:<index>")
    from tierstore.dma.gpu.cupy_api import CupyApi
    from tierstore.dma.gpu.engine import CudaCopyEngine

    return CudaCopyEngine(
        CupyApi(int(device.removeprefix("cuda:")), kernel_sms=config.kernel_sms),
        device=device,
        config=config,
        counters=counters,
        spawn=spawn,
        is_io_under_way=is_io_under_way,
        compute_stream=compute_stream,
    )
