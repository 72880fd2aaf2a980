"""A front over a real server: what is reused of histories whose replies encode to other tokens than were sampled."""
