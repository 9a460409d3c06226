"""Device code: Triton kernels and their launchers. Nothing here knows vLLM."""
