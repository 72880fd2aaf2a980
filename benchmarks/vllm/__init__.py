"""vLLM with our connector, measured and tested in processes of its own."""
