"""Benchmarks that measure muster beside its peers, in one run; all print the shape of `muster.bench.report.Report`."""
