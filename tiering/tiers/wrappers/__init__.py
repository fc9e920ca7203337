"""Tiers around tiers: a guard for one disk, a stripe over several."""
