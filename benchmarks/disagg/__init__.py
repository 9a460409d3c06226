"""Prefill and decode on two servers over shaped links: `python -m benchmarks.disagg`."""
