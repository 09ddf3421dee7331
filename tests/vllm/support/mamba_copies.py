"""What vLLM 0.32's build for CPUs lacks for guesses on a hybrid model: two of its Triton kernels.

`MambaSpecDecodeGPUContext` copies states between blocks with kernels that have no counterpart on a
CPU. Here are their decisions and copies over the same tables of addresses.
"""

import ctypes
from typing import Any

__all__ = ["apply"]


def apply() -> None:
    """Replace both launches in this process."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    MambaSpecDecodeGPUContext.run_fused_precopy = _precopy
    MambaSpecDecodeGPUContext.run_fused_postprocess = _postprocess


def _precopy(  # noqa: PLR0917 - as vLLM calls it
    self: Any,
    num_reqs: int,
    state_idx_gpu: Any,
    src_col_gpu: Any,
    token_bias_gpu: Any,
    idx_mapping: Any,
) -> None:
    """`precopy_mamba_align_fused_kernel`."""
    assert idx_mapping is None
    if not self.is_initialized:
        return
    for row in range(num_reqs):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source >= 0 and source != target:
            _copy_states(self, row, source, target, int(token_bias_gpu[row]))


def _postprocess(  # noqa: PLR0917 - as vLLM calls it
    self: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any,
    num_computed_tokens_gpu: Any,
    num_draft_tokens_gpu: Any,
) -> None:
    """`postprocess_mamba_fused_kernel`."""
    if not self.is_initialized:
        return
    self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    for row in range(num_reqs):
        source = int(mamba_state_idx_gpu[row])
        running = int(num_computed_tokens_gpu[row]) + int(num_scheduled_tokens_gpu[row])
        running -= int(num_draft_tokens_gpu[row])
        computed = running + int(num_accepted_tokens_gpu[row]) - 1
        boundary = computed // self.block_size * self.block_size
        if boundary < running:
            continue
        bias, target = boundary - running, boundary // self.block_size - 1
        if source == target:
            self.num_accepted_tokens_out[row] = 1
        if source != target or bias:
            _copy_states(self, row, source, target, bias)


def _copy_states(context: Any, row: int, source: int, target: int, bias: int) -> None:
    """`_copy_mamba_state_block`, of all layers."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    for i in range(context.num_states):
        table = int(context.block_table_ptrs[int(context.state_group_indices[i])])
        table += row * int(context.block_table_stride_req) * ctypes.sizeof(ctypes.c_int32)
        blocks = ctypes.cast(table, ctypes.POINTER(ctypes.c_int32))
        base, stride = int(context.state_base_addrs[i]), int(context.state_block_strides[i])
        item_bytes, width = int(context.state_elem_sizes[i]), int(context.state_conv_widths[i])
        inner_bytes = int(context.state_inner_sizes[i]) * item_bytes
        to = base + blocks[target] * stride
        if not width:
            ctypes.memmove(to, base + blocks[source + bias] * stride, inner_bytes)
            continue
        start = base + blocks[source] * stride
        if not is_conv_state_dim_first():
            ctypes.memmove(to, start + bias * inner_bytes, (width - bias) * inner_bytes)
            continue
        row_stride = int(context.state_dim_row_stride[i])
        for number in range(int(context.state_dim_row_count[i])):
            first = start + number * row_stride + bias * item_bytes
            ctypes.memmove(to + number * row_stride, first, (width - bias) * item_bytes)
