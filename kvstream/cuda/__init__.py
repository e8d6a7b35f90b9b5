"""KV streaming on CUDA: attention over a context whose KV does not fit on the device, exact at any pool size.

``DESIGN.md`` beside this file says how it works. Nothing is imported here: the pure parts need numpy alone, and only
``device`` needs a driver.
"""
