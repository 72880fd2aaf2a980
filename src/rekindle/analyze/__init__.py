"""`rekindle analyze`: what of anybody's request log could have been reused, and which lines burn the rest."""
