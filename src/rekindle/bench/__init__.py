"""Programs that measure. They reach the server over HTTP like anybody else."""
