"""Bytes and folders: how a checkpoint lies on a disk or at a URL. Nothing here knows models."""
