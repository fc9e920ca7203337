"""Host tiers of other engines, as a tier of this one, and this one's host tier for them."""
