"""llama.cpp's server as what computes: what it is sent and sends, how one is started, and the states of its slots."""
