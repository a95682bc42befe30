# SPDX-License-Identifier: MIT OR Apache-2.0
"""The parts of kv_cache.py: a small transformer, its cache in pages, and the two nodes that share it."""
