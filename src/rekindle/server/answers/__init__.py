"""From a body to the last byte of its answer, whole or as a stream, in any dialect."""
