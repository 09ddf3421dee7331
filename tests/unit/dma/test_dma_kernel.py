"""The copy kernel, compiled for the host: its warps one after the other, its lanes in lockstep."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.dma.gpu.kernel_source import KERNEL_NAME, KERNEL_SOURCE, THREADS_PER_BLOCK

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PROLOGUE = """
#include <stdint.h>
#include <cstdlib>
struct Index { int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
struct uint4 { uint32_t x, y, z, w; };
static int unaligned = 0;
#define __global__
#define __launch_bounds__(threads)
#define __restrict__ __restrict
"""
EPILOGUE = f"""
extern "C" void launch(int blocks, int threads, const long long* table, long long n, long long p) {{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            {KERNEL_NAME}(table, n, p);
}}
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    source = folder / "kernel.cpp"
    source.write_text(PROLOGUE + KERNEL_SOURCE + EPILOGUE)
    library = folder / "kernel.so"
    # Sanitized alignment: a 16-byte access at another address aborts, as it does on a GPU.
    flags = [
        "-O1",
        "-shared",
        "-fPIC",
        "-fsanitize=alignment",
        "-fsanitize-undefined-trap-on-error",
    ]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).launch
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    return function


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5000)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 3),
    st.sampled_from([32, 64]),
    st.integers(1, 16),
)
def test_every_byte_of_every_run_is_copied_and_no_other(launch, runs, blocks, threads, parts):
    """Any alignment, any length, any division of runs among warps."""
    size = sum(gap_a + gap_b + length for gap_a, gap_b, length in runs) + 64
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    expected = target.copy()
    table = np.zeros((len(runs), 3), np.int64)
    to = 0
    start = 0
    for i, (gap_to, gap_from, length) in enumerate(runs):
        to += gap_to
        start += gap_from
        table[i] = target.ctypes.data + to, source.ctypes.data + start, length
        expected[to : to + length] = source[start : start + length]
        to += length
        start += length
    launch(blocks, threads, table.ctypes.data, len(runs), parts)
    assert np.array_equal(target, expected)


def test_the_compiler_is_told_how_many_threads_share_the_registers() -> None:
    assert f"__launch_bounds__({THREADS_PER_BLOCK}) {KERNEL_NAME}(" in KERNEL_SOURCE
