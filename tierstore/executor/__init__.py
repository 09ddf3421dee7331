"""The data plane of one device: moves bytes as commanded and reports; decides nothing."""

from tierstore.executor.executor import TransferExecutor

__all__ = ["TransferExecutor"]
