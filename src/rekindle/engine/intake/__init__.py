"""The intake thread: requests become token ids, next prompts are computed ahead."""
