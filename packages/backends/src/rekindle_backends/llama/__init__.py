"""llama.cpp's own formats: the states of its server's slots, as blocks of ours."""
