"""The codec on a GPU: launches of the Triton kernels, and the memory between host and device."""
