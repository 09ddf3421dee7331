"""CUDA source of the kernel that gathers and scatters small runs through mapped pinned memory.

    table   | target | source | bytes |   one row of three int64 per run
    warps   run r, part p  ->  warp r * parts + p, then that plus the number of warps, ...

A part is a multiple of 16 bytes, so that every part of a run is aligned as the run is. Where target
and source are equally misaligned, a head of less than 16 bytes, 16-byte accesses, and a tail; where
they are not, single bytes. Four accesses per thread are in flight: the bus is far away.
"""

__all__ = ["KERNEL_NAME", "KERNEL_SOURCE", "THREADS_PER_BLOCK"]

KERNEL_NAME = "tierstore_copy_runs"

THREADS_PER_BLOCK = 1024
"""The source says so too: else the compiler might give a thread so many registers that no block of
this size can start."""

KERNEL_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(1024) tierstore_copy_runs(
    const long long* __restrict__ table, const long long run_count, const long long parts)
{
    const int lane = threadIdx.x & 31;
    const long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    const long long warp_count = ((long long)gridDim.x * blockDim.x) >> 5;
    for (long long item = warp; item < run_count * parts; item += warp_count) {
        const long long run = item / parts;
        const long long run_bytes = table[3 * run + 2];
        const long long part_bytes = ((run_bytes + parts - 1) / parts + 15) & ~15LL;
        const long long start = (item % parts) * part_bytes;
        if (start >= run_bytes) {
            continue;
        }
        char* target = (char*)table[3 * run] + start;
        const char* source = (const char*)table[3 * run + 1] + start;
        long long bytes = run_bytes - start < part_bytes ? run_bytes - start : part_bytes;
        const unsigned long long to = (unsigned long long)target;
        const unsigned long long from = (unsigned long long)source;
        if (((to ^ from) & 15) != 0) {
            for (long long i = lane; i < bytes; i += 32) {
                target[i] = source[i];
            }
            continue;
        }
        long long head = (16 - (to & 15)) & 15;
        head = head < bytes ? head : bytes;
        if (lane < head) {
            target[lane] = source[lane];
        }
        target += head;
        source += head;
        bytes -= head;
        const long long unit_count = bytes >> 4;
        uint4* units_to = (uint4*)target;
        const uint4* units_from = (const uint4*)source;
        long long i = lane;
        for (; i + 96 < unit_count; i += 128) {
            const uint4 a = units_from[i];
            const uint4 b = units_from[i + 32];
            const uint4 c = units_from[i + 64];
            const uint4 d = units_from[i + 96];
            units_to[i] = a;
            units_to[i + 32] = b;
            units_to[i + 64] = c;
            units_to[i + 96] = d;
        }
        for (; i < unit_count; i += 32) {
            units_to[i] = units_from[i];
        }
        const long long done = unit_count << 4;
        if (lane < bytes - done) {
            target[done + lane] = source[done + lane];
        }
    }
}
"""
