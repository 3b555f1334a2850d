"""Benchmarks: each script measures brayx beside a yardstick in one run and prints the tables of docs/benchmarks.md."""
