"""Sharding of dense parameters, experts and embedding tables in one Lightning strategy."""
