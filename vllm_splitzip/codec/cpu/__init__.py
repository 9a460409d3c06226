"""The codec on a CPU: loops that numba compiles, on vectors where the processor has them."""
