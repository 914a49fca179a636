"""Chrome traces of the profiler: read, summarise and merge them.

Traces may be huge or damaged, or come from another host: they are read piece by piece, within
limits.
"""
