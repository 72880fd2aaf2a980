"""Opening, checking, purging and making room: what looks at a store as a whole, and at the other stores near it."""
