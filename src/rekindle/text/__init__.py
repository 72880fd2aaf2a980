"""Messages, templates, tokens and the bytes of text; knows neither blocks nor tensors."""
