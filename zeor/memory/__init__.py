"""WHAT: roles and where they rest, buffers that come and go, views, formats, devices.

Knows the layout; knows no process group, no hook and no optimizer.
"""
