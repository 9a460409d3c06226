"""What `benchmarks.gpu_check` does on a GPU: first the proofs, then the times."""
