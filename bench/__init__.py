"""Benchmarks: our processes against the peers, side by side in one run."""
