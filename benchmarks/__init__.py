"""Benchmarks: each script measures brayx and a reference in the same run, and prints tables of docs/benchmarks.md."""
