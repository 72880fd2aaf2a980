"""Programs that measure and show: the demo, the benchmarks. They reach the server over HTTP like anybody else."""
